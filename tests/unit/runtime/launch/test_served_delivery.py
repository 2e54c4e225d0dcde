"""A worker downloads the workspace from the serve pod; both programs are real."""

import http.client
import http.server
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ports import refusing_port
from torchrun_api.contract.contents import Manifest
from torchrun_runtime.launch import served
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.served import Server, fetch
from unit.runtime.launching import PYTHONS, Launcher, measured
from unit.runtime.serving import publish, running, token

NOISE = random.Random(5)
FILES = {
    "train.py": b"print('hello')\n",
    "run.sh": b"#!/bin/sh\necho ran\n",
    "empty": b"",
    "data/large.bin": NOISE.randbytes(3_000_001),
    **{f"pkg/m{number}.py": NOISE.randbytes(number % 700) for number in range(300)},
}


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    directory = tmp_path / "claim"
    directory.mkdir()
    return directory


def server(url: str, directory: Path, manifest: Manifest, shown: str = "") -> Server:
    path = directory / "token"
    path.write_text(shown or token())
    return Server(url, str(path), manifest.sha256)


def held(target: Path) -> dict[str, bytes]:
    return {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}


def test_every_file_arrives_with_its_mode(
    claim: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = publish(claim, FILES, "logs/none")
    target = tmp_path / "app"
    with running(claim) as url:
        fetch(server(url, tmp_path, manifest), str(target), 5)
    assert held(target) == FILES
    size = sum(map(len, FILES.values()))
    line = rf"workspace: \d+ files, {size} bytes from {url} \((\d+)\.\d s\)$"
    seconds = re.search(line, capfd.readouterr().err, re.MULTILINE)
    assert seconds
    assert int(seconds[1]) < 300
    assert (target / "logs" / "none").is_dir()
    assert stat.S_IMODE((target / "run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((target / "train.py").stat().st_mode) == 0o644


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parents[1].name)
def test_a_launcher_runs_what_it_fetched(python: str, claim: Path, tmp_path: Path) -> None:
    manifest = publish(claim, FILES)
    launcher = Launcher(python, tmp_path)
    source = tmp_path / "token"
    source.write_text(token())
    with running(claim) as url:
        result = launcher.run(
            ["./run.sh"],
            TORCHRUN_WORKSPACE_SOURCE=str(tmp_path),
            TORCHRUN_WORKSPACE_TARGET=str(tmp_path / "app"),
            TORCHRUN_WORKSPACE_URL=url,
            TORCHRUN_WORKSPACE_MANIFEST=manifest.sha256,
            http_proxy="http://127.0.0.1:1",
        )
    assert (result.exit_code, result.out) == (0, "ran\n"), result.err


def test_only_missing_files_are_sent_again(
    claim: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = publish(claim, FILES)
    target = tmp_path / "app"
    with running(claim) as url, cutting(url, after=10**9) as (near, passed):
        wanted = server(near, tmp_path, manifest)
        fetch(wanted, str(target), 5)
        first = passed[0]
        (target / "train.py").write_bytes(b"another")
        (target / "empty").unlink()
        fetch(wanted, str(target), 5)
    assert held(target) == FILES
    assert passed[0] - first < first / 10


@pytest.mark.parametrize("name", ["n" * 255, "a.torchrun-new", ".torchrun-a"])
def test_a_file_may_have_any_name(claim: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "app"
    for content in (b"1", b"2"):  # an edit of its neighbour
        files = {"a": content, name: b"keep me"}
        manifest = publish(claim, files)
        with running(claim) as url:
            fetch(server(url, tmp_path, manifest), str(target), 5)
        assert held(target) == files


def test_a_broken_connection_resumes_with_the_next_file(
    claim: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = {path: content for path, content in FILES.items() if len(content) < 1000}
    manifest = publish(claim, small)
    target = tmp_path / "app"
    with running(claim) as url, cutting(url, after=25_000, times=4) as (near, _):
        fetch(server(near, tmp_path, manifest), str(target), 30)
    assert held(target) == small
    errors = capfd.readouterr().err
    assert "continuing after" in errors
    assert "retrying" not in errors, "a request that brings files is repeated without a pause"


def test_consecutive_files_are_one_range() -> None:
    assert served._ranges([1, 2, 3, 7, 9, 10]) == [[1, 3], [7, 7], [9, 10]]


@pytest.mark.long  # much work
def test_64_workers_fetch_the_whole_workspace(claim: Path, tmp_path: Path) -> None:
    manifest = publish(claim, FILES)
    targets = [tmp_path / f"app-{number}" for number in range(64)]
    with running(claim) as url, ThreadPoolExecutor(64) as gang:
        wanted = server(url, tmp_path, manifest)
        list(gang.map(lambda target: fetch(wanted, str(target), 300), targets))
    assert all(held(target) == FILES for target in targets)


def test_a_damaged_file_is_refused(claim: Path, tmp_path: Path) -> None:
    manifest = publish(claim, {"good.py": b"1", "z.py": b"good"})
    (claim / "revisions" / "1" / "tree" / "z.py").write_bytes(b"evil")
    target = tmp_path / "app"
    with (
        running(claim) as url,
        pytest.raises(LaunchError, match=r"z\.py was damaged during the download"),
    ):
        fetch(server(url, tmp_path, manifest), str(target), 0.1)
    assert held(target) == {"good.py": b"1"}


def test_a_workspace_with_another_digest_is_refused(claim: Path, tmp_path: Path) -> None:
    old = publish(claim, FILES)
    publish(claim, {"train.py": b"other"})
    with running(claim) as url, pytest.raises(LaunchError, match="This attempt started with"):
        fetch(server(url, tmp_path, old), str(tmp_path / "app"), 30)
    assert not (tmp_path / "app").exists()


def test_a_worker_waits_for_the_first_revision(claim: Path, tmp_path: Path) -> None:
    manifest = publish(tmp_path / "elsewhere", FILES)
    target = tmp_path / "app"
    with running(claim) as url, ThreadPoolExecutor(1) as worker:
        fetching = worker.submit(fetch, server(url, tmp_path, manifest), str(target), 60)
        assert status(url, "/readyz") == 503
        publish(claim, FILES)
        assert status(url, "/readyz") == 200
        fetching.result(120)
    assert held(target) == FILES


def test_requests_without_a_valid_token_are_refused(claim: Path, tmp_path: Path) -> None:
    manifest = publish(claim, FILES)
    with running(claim) as url:
        assert status(url, "/v1/manifest") == 401
        assert status(url, "/v1/files", b"{}") == 401
        stranger = server(url, tmp_path, manifest, token(aud=["elsewhere"]))
        with pytest.raises(LaunchError, match=r"401: .*The token is not valid"):
            fetch(stranger, str(tmp_path / "app"), 0.1)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", 400),
        (b'{"manifest": "x"}', 400),
        (b'{"manifest": "x", "entries": [["a", 1]]}', 400),
        (b'{"manifest": "x", "entries": [[0, 1]]}', 409),
        (b'{"manifest": "%s", "entries": [[0, 9999]]}', 409),
        (b'{"manifest": "%s", "entries": [[-1, 0]]}', 409),
        (b'{"manifest": "%s", "entries": []}', 200),
        (b'{"manifest": "%s", "entries": [[0, 1], [2, 2]]}', 200),
        (b'{"manifest": "%s", "entries": [[0, 2], [2, 3]]}', 400),
        (b'{"manifest": "%s", "entries": [[2, 2], [0, 1]]}', 400),
        (b'{"manifest": "%s", "entries": [' + b"[0, 9]," * 20_000 + b"[0, 9]]}", 400),
    ],
)
def test_request_bodies_are_checked(claim: Path, body: bytes, expected: int) -> None:
    manifest = publish(claim, FILES)
    with running(claim) as url:
        filled = body.replace(b"%s", manifest.sha256.encode())
        assert status(url, "/v1/files", filled, token()) == expected


def test_a_manifest_with_paths_outside_the_target_is_refused(claim: Path, tmp_path: Path) -> None:
    publish(claim, {"a": b"1"})
    text = f"{'0' * 64} 1 644 ../escaped\n"
    (claim / "revisions" / "1" / "manifest").write_text(text)
    with running(claim) as url, pytest.raises(LaunchError, match=r"path '\.\./escaped'"):
        fetch(
            server(url, tmp_path, Manifest(()), "")._replace(manifest=_sha256(text)),
            str(tmp_path / "app"),
            5,
        )


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_with_the_token(tmp_path: Path, code: int) -> None:
    seen: list[str] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(code)
            if self.path == "/v1/manifest":
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_address[1]}"
        wanted = server(url, tmp_path, Manifest(()), "secret")
        with pytest.raises(LaunchError, match=f"returned HTTP {code}"):
            fetch(wanted, str(tmp_path / "app"), 0.1)
        listening.shutdown()
    assert seen == ["/v1/manifest Bearer secret"]


def test_a_read_only_target_is_reported(claim: Path, tmp_path: Path) -> None:
    manifest = publish(claim, FILES)
    (tmp_path / "app").write_text("a file")
    with running(claim) as url, pytest.raises(LaunchError, match="Cannot write the workspace"):
        fetch(server(url, tmp_path, manifest), str(tmp_path / "app"), 5)


def test_the_wait_for_a_missing_server_is_bounded(tmp_path: Path) -> None:
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(LaunchError, match="cannot reach"):
            fetch(server(url, tmp_path, Manifest(())), str(tmp_path / "app"), 0.1)


@pytest.mark.long
def test_the_program_serves_until_sigterm(claim: Path, tmp_path: Path) -> None:
    publish(claim, FILES)
    import certifi

    (tmp_path / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    environment = {
        **os.environ,
        **measured(),
        "KUBERNETES_SERVICE_HOST": "::1",
        "TORCHRUN_SERVE_NAMESPACE": "ml",
        "TORCHRUN_SERVE_JOB": "train",
        "TORCHRUN_SERVE_DIR": str(claim),
        "TORCHRUN_SERVE_HOST": "127.0.0.1",
        "TORCHRUN_SERVE_PORT": "0",
        "TORCHRUN_SERVE_API_DIR": str(tmp_path),
    }
    program = [sys.executable, "-m", "torchrun_runtime.serve"]
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        import json

        port = json.loads(process.stdout.readline())["port"]
        assert status(f"http://127.0.0.1:{port}", "/readyz") == 200
        assert status(f"http://127.0.0.1:{port}", "/v1/manifest", shown=token()) == 503, "no keys"
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(60) == 0
    for wrong in ({"TORCHRUN_SERVE_JOB": ""}, {"TORCHRUN_SERVE_PORT": "many"}):
        ended = subprocess.run(
            program, env={**environment, **wrong}, capture_output=True, text=True
        )
        assert ended.returncode == 1
        assert next(iter(wrong)) in ended.stdout
    usage = subprocess.run([*program, "--help"], env=environment, capture_output=True, text=True)
    assert "usage: torchrun-serve" in usage.stdout


def _sha256(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def status(url: str, path: str, body: bytes | None = None, shown: str = "") -> int:
    request = urllib.request.Request(url + path, body, {"Authorization": f"Bearer {shown}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@contextmanager
def cutting(url: str, after: int, times: int = 10**9) -> Iterator[tuple[str, list[int]]]:
    """A relay to the server that cuts each connection after some bytes of the response."""
    host, port = (
        http.client.HTTPConnection(url.removeprefix("http://")).host,
        int(url.rpartition(":")[2]),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    passed, left = [0], [times]

    def carry(near: socket.socket) -> None:
        with near, socket.create_connection((host, port)) as far:
            upward = threading.Thread(target=_pump, args=(near, far, 10**9, [0]))
            upward.start()
            limit = after if left[0] > 0 else 10**9
            left[0] -= 1
            _pump(far, near, limit, passed)
            for end in (near, far):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            upward.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=carry, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", passed
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _pump(source: socket.socket, sink: socket.socket, most: int, passed: list[int]) -> None:
    done = 0
    with suppress(OSError):
        while done < most and (piece := source.recv(min(1 << 16, most - done))):
            sink.sendall(piece)
            done += len(piece)
            passed[0] += len(piece)
