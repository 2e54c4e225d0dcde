"""The server of the workspace, towards clients that are no workers. test_served_delivery has the workers."""

import json
import os
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from torchrun_runtime.serve import app
from unit.runtime.serving import publish, running, token


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    publish(tmp_path / "claim", {"train.py": b"1"})
    return tmp_path / "claim"


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)


def answer(url: str, request: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    with connect(url) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def manifest(url: str, shown: str) -> bytes:
    headers = f"Host: pod\r\nConnection: close\r\nAuthorization: Bearer {shown}\r\n"
    return answer(url, f"GET /v1/manifest HTTP/1.1\r\n{headers}\r\n".encode())


def test_strangers_do_not_fill_the_log(
    claim: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with running(claim) as url:
        for _ in range(5):
            assert b" 400 " in answer(url, b"GET / HTTP/9.9\r\n\r\n")
            assert b" 401 " in manifest(url, "forged")
    lines = [json.loads(line)["event"] for line in capfd.readouterr().out.splitlines()]
    assert lines == ["refused"]
    assert caplog.records == []


def test_our_own_errors_are_logged(
    claim: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("torchrun_runtime.serve.tree.ServedTree.newest", fail)
    with running(claim) as url:
        assert b" 500 " in manifest(url, token())
    assert "a bug" in caplog.text


def test_idle_connections_do_not_keep_workers_out(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_UNAUTHENTICATED", 4)
    with running(claim) as url:
        idle = [connect(url) for _ in range(8)]
        assert b" 200 " in manifest(url, token())
        assert [connection.recv(1) for connection in idle[:4]] == [b""] * 4
        for connection in idle:
            connection.close()


def test_a_connection_without_a_request_is_closed(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_IDLE_SECONDS", 0.2)
    with (
        running(claim) as url,
        connect(url) as connection,
        suppress(ConnectionError),  # closed before these bytes, if they come late
    ):
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost:")
        assert connection.recv(1) == b""


def test_a_revision_is_read_once_for_all_workers(claim: Path) -> None:
    """The file of the manifest is a pipe: a reader waits until the test writes, once."""
    path = claim / "revisions" / "1" / "manifest"
    text = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    with running(claim) as url, ThreadPoolExecutor(2 * app.STREAMS) as workers:
        answers = [workers.submit(manifest, url, token()) for _ in range(2 * app.STREAMS)]
        with path.open("wb") as pipe:
            for _ in range(20):  # while all workers wait
                assert b" 200 " in answer(url, b"GET /readyz HTTP/1.0\r\n\r\n")
            pipe.write(text)
        bodies = {reply.result(60).partition(b"\r\n\r\n")[2] for reply in answers}
    assert {zlib.decompress(body) for body in bodies} == {text}
