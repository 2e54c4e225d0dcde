"""The pod's protocol over real connections: whole, cut, slow, wrong, and many at once."""

import os
import random
import socket
import threading
from pathlib import Path

import pytest

from torchrun_runtime.sync.__main__ import open_workflow
from torchrun_runtime.sync.claim import Claim, Marker
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.server import Server
from torchrun_runtime.sync.settings import Limits
from unit.runtime import hostile
from unit.runtime.syncing import Client, Pod, archive, digest, pod, settings

CODE = archive({"train.py": b"print('hello')", "pkg/data.bin": random.Random(0).randbytes(300_000)})

NOTHING = {"sha256": "", "offset": 0, "workspace": "", "missing": [], "base": "", "revision": 0}


def prepared(directory: Path) -> Claim:
    claim = Claim(directory)
    claim.prepare()
    return claim


def finished(running: Pod) -> Marker:
    result = running.end()
    assert isinstance(result, Marker), result
    return result


def test_takes_an_archive_in_one_piece(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        assert server.get("/readyz") == {"ready": True}
        assert server.get() == {**NOTHING, "state": "waiting"}
        assert server.put(CODE) == (202, {"state": "extracting"})
        assert server.until("done") == {
            **NOTHING,
            "state": "done",
            "sha256": digest(CODE),
            "offset": len(CODE),
            "revision": 1,
        }
        marker = finished(server)
    claim = tmp_path / "claim"
    assert (claim / "revisions/1/tree/train.py").read_text() == "print('hello')"
    assert (marker.sha256, marker.files, marker.bytes) == (digest(CODE), 2, 300_014)
    assert {path.name for path in claim.iterdir()} == {"env", "revisions", "state", ".sync_success"}


def test_takes_an_archive_in_pieces_and_tells_the_offset(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        assert server.put(CODE, 0, 1000) == (200, {"offset": 1000})
        assert server.get() == {
            **NOTHING,
            "state": "receiving",
            "sha256": digest(CODE),
            "offset": 1000,
        }
        status, body = server.put(CODE, 0, 1000)
        assert (status, body["offset"]) == (409, 1000)
        status, body = server.put(CODE, 2000)
        assert (status, body["offset"]) == (409, 1000)
        assert server.put(CODE, 1000)[0] == 202
        assert finished(server).files == 2


def test_goes_on_after_connections_that_break(tmp_path: Path) -> None:
    randomness = random.Random(1)
    with pod(settings(tmp_path / "claim")) as server:
        while (held := int(str(server.get()["offset"]))) < len(CODE):
            cut = randomness.randint(1, 60_000)
            connection = server.begin(CODE, held, cut)
            if held + cut < len(CODE):
                connection.close()
            else:
                assert connection.getresponse().status == 202
                connection.close()
            while int(str(server.get()["offset"])) < min(held + cut, len(CODE)):
                pass
        assert finished(server).files == 2


def test_a_silent_connection_holds_up_nobody(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        silent = server.begin(CODE, 0, 5000)
        while server.get()["offset"] != 5000:
            pass
        assert server.put(CODE, 5000)[0] == 202
        assert finished(server).files == 2
        silent.close()


def test_a_refusal_reaches_a_client_that_is_still_sending(tmp_path: Path) -> None:
    large = bytes(16 << 20)
    with pod(settings(tmp_path / "claim")) as server:
        status, body = server.put(large, start=1)
        assert (status, body["offset"]) == (409, 0)


def test_gives_up_a_silent_connection(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", read_timeout=0.2)) as server:
        silent = server.begin(CODE, 0, 5000)
        assert silent.sock.recv(1) == b""
        silent.close()
        assert server.put(CODE, 5000)[0] == 202
        assert finished(server).files == 2


def test_answers_while_a_body_is_coming(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        slow = server.begin(CODE, 0, 100)
        for _ in range(20):
            assert server.get()["state"] in ("waiting", "receiving")
        slow.send(CODE[100:])
        assert slow.getresponse().status == 202
        slow.close()


def test_two_clients_at_once_still_make_one_workspace(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:

        def upload() -> None:
            while (state := server.get())["state"] in ("waiting", "receiving"):
                start = int(str(state["offset"]))
                server.put(CODE, start, start + 20_000)

        threads = [threading.Thread(target=upload) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert finished(server).sha256 == digest(CODE)


def test_refuses_wrong_bytes_and_waits_for_the_right_ones(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        status, body = server.put(CODE, sha256=digest(b"other"))
        assert (status, body["reason"]) == (422, "DigestMismatch")
        state = server.get()
        assert (state["state"], state["offset"], state["reason"]) == (
            "waiting", 0, "DigestMismatch"
        )  # fmt: skip
        assert server.put(CODE)[0] == 202
        assert finished(server).files == 2


def test_takes_only_the_archive_that_the_job_names(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", sha256=digest(CODE))) as server:
        status, body = server.put(archive({"other.py": b""}))
        assert (status, body["reason"]) == (422, "WrongArchive")
        assert server.put(CODE)[0] == 202
        assert finished(server).sha256 == digest(CODE)


BAD = hostile.build({"fine": b"x"}, hostile.HOSTILE["parent"], first=False)


def test_a_refused_archive_is_explained_and_another_taken(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        assert server.put(BAD)[0] == 202
        state = server.until("failed")
        assert (state["reason"], state["offset"]) == ("UnsafeName", 0)
        assert state["sha256"] == digest(BAD)
        assert "'../x'" in str(state["message"])
        assert server.put(CODE)[0] == 202
        assert finished(server).files == 2
    assert {path.name for path in (tmp_path / "claim").iterdir()} == {
        "env",
        "revisions",
        "state",
        ".sync_success",
    }


def test_a_refused_archive_that_the_job_names_ends_the_pod(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", sha256=digest(BAD))) as server:
        assert server.put(BAD)[0] == 202
        failure = server.end()
        assert isinstance(failure, SyncError)
        assert (failure.reason, failure.permanent) == ("UnsafeName", True)
        assert server.get()["state"] == "failed"


def test_an_archive_that_is_there_already_is_not_taken_again(tmp_path: Path) -> None:
    workflow = open_workflow(settings(tmp_path / "claim"), prepared(tmp_path / "claim"))
    with Server("127.0.0.1", 0, workflow, 10) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        client = Client(server.port)
        assert client.put(CODE)[0] == 202
        assert client.get()["state"] == "extracting"
        assert client.put(CODE)[0] == 409
        status, body = client.put(archive({"other.py": b""}))
        assert (status, body["reason"]) == (503, "Busy")
        server.shutdown()


def test_caps_and_full_disks_have_statuses_of_their_own(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", limits=Limits(bytes=2**55))) as server:
        for total, status, reason in (
            (2**56, 413, "ArchiveTooLarge"),
            (2**54, 507, "WorkspaceFull"),
        ):
            headers = {"Content-Range": f"bytes 0-0/{total}", "X-Torchrun-Sha256": "0" * 64}
            answer = server.request("PUT", "/v1/upload", b"x", dict(headers))
            assert (answer[0], answer[1]["reason"]) == (status, reason)


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
        ({"Content-Length": "-1"}, 411),
        ({"Content-Length": "٣"}, 400),
        ({"Content-Length": "1e3"}, 411),
    ],
)
def test_refuses_malformed_requests(
    tmp_path: Path, changes: dict[str, str | None], status: int
) -> None:
    headers = {"Content-Range": "bytes 0-3/9", "X-Torchrun-Sha256": "0" * 64, "Content-Length": "4"}
    lines = [f"{k}: {v}" for k, v in {**headers, **changes}.items() if v is not None]
    request = "PUT /v1/upload HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\nabcd"
    with pod(settings(tmp_path / "claim")) as server:
        answer = raw(server.port, request.encode())
        assert int(answer.split()[1]) in (status, 411), answer
        assert server.get()["offset"] == 0


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /etc/passwd HTTP/1.1\r\n\r\n",
        b"DELETE /v1/upload HTTP/1.1\r\n\r\n",
        b"PUT /tree/x HTTP/1.1\r\nContent-Length: 1\r\n\r\nx",
        b"nonsense\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"",
    ],
)
def test_survives_what_is_no_upload(tmp_path: Path, request_: bytes) -> None:
    with pod(settings(tmp_path / "claim", read_timeout=5)) as server:
        answer = raw(server.port, request_)
        assert b" 2" not in answer.partition(b"\r\n")[0]
        assert server.get()["state"] == "waiting"


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def test_a_flood_of_connections_is_turned_away_not_queued(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        flood = [
            socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(80)
        ]
        turned_away = [connection for connection in flood[64:] if connection.recv(1) == b""]
        assert len(turned_away) == 16
        for connection in flood:
            connection.close()
        while True:
            try:
                assert server.get()["state"] == "waiting"
                break
            except (OSError, ValueError):
                continue


def test_listens_on_both_families(tmp_path: Path) -> None:
    workflow = open_workflow(settings(tmp_path / "claim"), prepared(tmp_path / "claim"))
    with Server("", 0, workflow, 10) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        assert Client(server.port).get()["state"] == "waiting"
        if socket.has_dualstack_ipv6() and os.path.exists("/proc/net/if_inet6"):
            with socket.create_connection(("::1", server.port), timeout=10) as connection:
                connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                assert b"200" in connection.recv(100)
        server.shutdown()
