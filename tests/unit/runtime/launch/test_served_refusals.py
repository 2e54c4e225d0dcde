"""Which refusals of the serve pod end a download, and which are tried again."""

import http.server
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchrun_runtime.launch import served
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.served import ReplacedError, Server, fetch


@contextmanager
def refusing(
    code: int, directory: Path, text: bytes = b"reason"
) -> Iterator[tuple[Server, list[str]]]:
    """A server that answers with this code, and the requests to it."""
    seen: list[str] = []

    class Refusal(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    (directory / "token").write_text("token")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{listening.server_address[1]}"
        try:
            yield Server(url, str(directory / "token"), "digest"), seen
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize("code", [400, 404, 409])
def test_a_refusal_that_stays_is_not_tried_again(tmp_path: Path, code: int) -> None:
    with refusing(code, tmp_path) as (server, seen):
        with pytest.raises(LaunchError, match=f"returned HTTP {code}: reason$") as failure:
            fetch(server, str(tmp_path / "app"), 3)
        assert seen == ["/v1/manifest"]
    assert failure.value.reason == "WorkspaceNotReady"


def test_2000_bytes_of_a_refusal_are_reported(tmp_path: Path) -> None:
    with (
        refusing(400, tmp_path, b"x" * 3000) as (server, _),
        pytest.raises(LaunchError, match=f": {'x' * 2000}$"),
    ):
        fetch(server, str(tmp_path / "app"), 3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"no zlib", "the manifest is damaged: "),
        (zlib.compress(b"x" * 1000)[:-1], "the manifest is too large or incomplete"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: bytes, problem: str) -> None:
    with (
        refusing(200, tmp_path, text) as (server, _),
        pytest.raises(LaunchError, match=f"not delivered within 0 s: {problem}"),
    ):
        fetch(server, str(tmp_path / "app"), 0.0)


@pytest.mark.parametrize("code", [401, 405, 410, 500, 503])
def test_another_refusal_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    now = 0.0

    def wait(replaced: object, seconds: float, waiting_for: str, pause: float) -> bool:
        nonlocal now
        now += seconds
        return False

    monkeypatch.setattr(served, "wait_until", wait)
    monkeypatch.setattr(served, "time", SimpleNamespace(monotonic=lambda: now))
    text = r"The workspace was not delivered within 2 s: http\S+ returned HTTP \d+: reason\."
    with refusing(code, tmp_path) as (server, seen):
        with pytest.raises(LaunchError, match=text) as failure:
            fetch(server, str(tmp_path / "app"), 2.0)
        assert len(seen) == 3  # at 0, 0.5 and 1.5 s
    assert failure.value.reason == "WorkspaceNotReady"


def test_the_pauses_between_attempts_grow_up_to_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def wait(replaced: object, seconds: float, waiting_for: str, pause: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 7

    monkeypatch.setattr(served, "wait_until", wait)
    with refusing(503, tmp_path) as (server, seen):
        with pytest.raises(ReplacedError):
            fetch(server, str(tmp_path / "app"), 1000)
        assert len(seen) == 7
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
