"""Requests that are no uploads, or hide one, over real connections."""

import re
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from torchrun_runtime.sync.server import TOKEN_HEADER
from unit.runtime.syncing import TOKEN, archive, digest, pod, settings

CODE = archive({"train.py": b"print('hello')"})


def raw(port: int, request: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        suppress(ConnectionError),  # if it does so before it has read everything
    ):
        connection.sendall(request)
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Content-Range": None}, 400),
        ({"Content-Range": "bytes 0-3"}, 400),
        ({"Content-Range": "bytes 0-4/9"}, 400),
        ({"Content-Range": "bytes 3-0/9"}, 400),
        ({"Content-Range": "bytes 6-9/9"}, 400),
        ({"Content-Range": "bytes 0-3/" + "9" * 40}, 400),
        ({"Content-Range": "bytes -1-2/9"}, 400),
        ({"X-Torchrun-Sha256": None}, 400),
        ({"X-Torchrun-Sha256": "../../etc/passwd"}, 400),
        ({"Content-Length": "-1"}, 400),
        ({"Content-Length": "٣"}, 400),
        ({"Content-Length": "1e3"}, 400),
    ],
)
def test_refuses_malformed_requests(
    tmp_path: Path, changes: dict[str, str | None], status: int
) -> None:
    headers = {"Content-Range": "bytes 0-3/9", "X-Torchrun-Sha256": "0" * 64, "Content-Length": "4"}
    headers |= {"Host": "pod", TOKEN_HEADER: TOKEN, "Connection": "close"}
    lines = [f"{k}: {v}" for k, v in {**headers, **changes}.items() if v is not None]
    request = "PUT /v1/upload HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\nabcd"
    with pod(settings(tmp_path / "claim")) as server:
        answer = raw(server.port, request.encode())
        assert int(answer.split()[1]) == status, answer
        assert server.get()["offset"] == 0


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /etc/passwd HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n",
        b"DELETE /v1/upload HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n",
        b"PUT /tree/x HTTP/1.1\r\nHost: pod\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
        b"nonsense\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: pod\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: pod\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_survives_requests_that_are_no_uploads(tmp_path: Path, request_: bytes) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        answer = raw(server.port, request_)
        assert b" 2" not in answer.partition(b"\r\n")[0]
        assert server.get()["state"] == "waiting"


@pytest.mark.parametrize("token", ["", digest(TOKEN.encode())], ids=["no token", "token"])
def test_a_digest_that_is_not_ascii_is_refused(tmp_path: Path, token: str) -> None:
    request = b"GET /v1/upload HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    with pod(settings(tmp_path / "claim", sha256=digest(CODE), token_sha256=token)) as server:
        for name in ("X-Torchrun-Sha256", TOKEN_HEADER):
            for value in ("\u00e9".encode(), b"\xff"):
                header = name.encode() + b": " + value
                assert b" 403 " in raw(server.port, request + header + b"\r\n\r\n")


def uploaded(data: bytes, **headers: str) -> bytes:
    """A PUT of a whole archive, as bytes."""
    fields = {
        "Host": "pod",
        "Content-Length": str(len(data)),
        "X-Torchrun-Sha256": digest(data),
        "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}",
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"PUT /v1/upload HTTP/1.1\r\n{lines}\r\n".encode() + data


@pytest.mark.parametrize(
    "framing",
    [
        b"GET /v1/upload HTTP/1.1\r\nHost: pod\r\nContent-Length: %d\r\n\r\n%s",
        b"GET /readyz HTTP/1.1\r\nHost: pod\r\nContent-Length: %d\r\n\r\n%s",
        b"PUT /v1/upload HTTP/1.1\r\nHost: pod\r\nContent-Length: %d\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n%s",
        b"PUT /v1/upload HTTP/1.1\r\nHost: pod\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Length: %d\r\n\r\n0\r\n\r\n%s",
        b"PUT /v1/upload HTTP/1.1\r\nHost: pod\r\nContent-Length: 0\r\n"
        b"Content-Length: %d\r\n\r\n%s",
    ],
    ids=["get", "readyz", "length first", "chunked first", "two lengths"],
)
def test_a_request_in_the_body_of_another_is_ignored(tmp_path: Path, framing: bytes) -> None:
    """The pod must not parse a request in a body, even one with a valid token."""
    hidden = uploaded(CODE, **{TOKEN_HEADER: TOKEN})
    following = b"GET /readyz HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n"
    with pod(settings(tmp_path / "claim")) as server:
        # Little enough for one read: a connection that is closed with unread bytes loses the answer.
        answer = raw(server.port, framing % (len(hidden), hidden) + following)
        first, *others = re.findall(rb"HTTP/1\.[01] (\d+)", answer)
        assert first in (b"400", b"411")
        assert others in ([], [b"200"]), "only the one that follows the body"
        assert (server.get()["state"], server.get()["offset"]) == ("waiting", 0)
