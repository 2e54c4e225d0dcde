"""A git server behind the HTTP proxy of the pod."""

import base64
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import SyncSettings
from unit.runtime.git_server import PASSWORD, GitServer, repository
from unit.runtime.syncing import fetch_failure, read_tree

pytestmark = pytest.mark.long  # processes


@contextmanager
def connect_proxy(login: str = "") -> Iterator[tuple[str, list[str], list[str]]]:
    """A proxy with CONNECT only. Yields its address, its requests and the logins that it received.

    login: "user:password" or "" for everybody.
    """
    requests: list[str] = []
    logins: list[str] = []

    class Proxy(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            requests.append(self.rfile.readline().decode().strip())
            given = ""
            while line := self.rfile.readline().decode().strip():
                if line.lower().startswith("proxy-authorization: basic "):
                    given = base64.b64decode(line.split()[-1]).decode()
                    logins.append(given)
            if login != given:
                self.wfile.write(
                    b"HTTP/1.1 407 Proxy Authentication Required\r\n"
                    b'Proxy-Authenticate: Basic realm="proxy"\r\nContent-Length: 0\r\n'
                    b"Connection: close\r\n\r\n"
                )
                return
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
        yield f"127.0.0.1:{proxy.server_address[1]}", requests, logins
        proxy.shutdown()


@pytest.mark.parametrize("excepted", [False, True], ids=["proxied", "no proxy"])
def test_a_repository_behind_the_proxy_of_the_pod(
    git_settings: SyncSettings,
    git_server: GitServer,
    monkeypatch: pytest.MonkeyPatch,
    excepted: bool,
):
    repository(git_server.root / "train", {"train.py": b"1"})
    with connect_proxy() as (address, requests, _):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{address}")
        monkeypatch.setenv("NO_PROXY", "localhost" if excepted else "")
        assert read_tree(git_settings, fetch(git_settings)) == {"train.py": b"1"}
    line = f"CONNECT localhost:{git_server.port} HTTP/1.1"
    assert set(requests) == (set() if excepted else {line})


def test_a_name_that_only_the_proxy_can_resolve(
    git_settings: SyncSettings, monkeypatch: pytest.MonkeyPatch
):
    """Addresses in URLs are still checked."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    named = replace(git_settings, url="https://git.invalid/train", secret="", secret_directory=None)
    assert fetch_failure(named).reason == "FetchFailed"
    for host in ("169.254.169.254", "2852039166", "[::ffff:169.254.169.254]"):
        assert fetch_failure(replace(named, url=f"https://{host}/a")).reason == "ForbiddenAddress"


@pytest.fixture
def private(git_server: GitServer, git_secret: Path) -> None:
    """The repository needs the login of the Secret."""
    repository(git_server.root / "train", {"train.py": b"1"})
    git_server.login = f"me:{PASSWORD}"
    (git_secret / "username").write_text("me")
    (git_secret / "password").write_text(PASSWORD)


@pytest.mark.usefixtures("private")
def test_a_proxy_with_a_login_of_its_own(
    git_settings: SyncSettings, monkeypatch: pytest.MonkeyPatch
):
    with connect_proxy("team:of-the-proxy") as (address, _, logins):
        monkeypatch.setenv("HTTPS_PROXY", f"http://team:of-the-proxy@{address}")
        assert read_tree(git_settings, fetch(git_settings)) == {"train.py": b"1"}
    assert set(logins) == {"team:of-the-proxy"}


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("user", ["", "team@", "team:wrong@"])
def test_a_proxy_does_not_get_the_login_of_the_repository(
    git_settings: SyncSettings, monkeypatch: pytest.MonkeyPatch, user: str
):
    with connect_proxy("team:of-the-proxy") as (address, _, logins):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{user}{address}")
        error = fetch_failure(git_settings)
    assert PASSWORD not in "".join(logins)
    assert (error.reason, error.permanent) == ("AccessDenied", False)
    assert "HTTPS_PROXY" in error.message
