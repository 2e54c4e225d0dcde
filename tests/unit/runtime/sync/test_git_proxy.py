"""A git server behind the HTTP proxy of the pod."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import Settings
from unit.runtime.git_server import GitServer, repository
from unit.runtime.syncing import fetch_failure, read_tree


@contextmanager
def connect_proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy with CONNECT only. Yields its URL and its requests."""
    requests: list[str] = []

    class Proxy(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            requests.append(self.rfile.readline().decode().strip())
            while self.rfile.readline().strip():
                pass
            host, _, port = requests[-1].split()[1].rpartition(":")
            with socket.create_connection((host, int(port))) as far:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=pump, args=(far, self.connection))
                back.start()
                pump(self.connection, far)
                back.join()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}", requests
        proxy.shutdown()


@pytest.mark.parametrize("excepted", [False, True], ids=["proxied", "no proxy"])
def test_a_repository_behind_the_proxy_of_the_pod(
    git_settings: Settings, git_server: GitServer, monkeypatch: pytest.MonkeyPatch, excepted: bool
):
    repository(git_server.root / "train", {"train.py": b"1"})
    with connect_proxy() as (url, requests):
        monkeypatch.setenv("HTTPS_PROXY", url)
        monkeypatch.setenv("NO_PROXY", "localhost" if excepted else "")
        assert read_tree(git_settings, fetch(git_settings)) == {"train.py": b"1"}
    line = f"CONNECT localhost:{git_server.port} HTTP/1.1"
    assert set(requests) == (set() if excepted else {line})


def test_a_name_that_only_the_proxy_can_resolve(
    git_settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    """Addresses in URLs are still checked."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    named = replace(git_settings, url="https://git.invalid/train", secret="", secret_directory=None)
    assert fetch_failure(named).reason == "FetchFailed"
    for host in ("169.254.169.254", "2852039166", "[::ffff:169.254.169.254]"):
        assert fetch_failure(replace(named, url=f"https://{host}/a")).reason == "ForbiddenAddress"
