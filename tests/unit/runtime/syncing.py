"""A real sync server for tests: in a thread of this process, or a process of its own."""

import hashlib
import http.client
import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from torchrun_runtime.sync import receive
from torchrun_runtime.sync.claim import Claim, Marker
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.server import TOKEN_HEADER, Authorization, UploadServer
from torchrun_runtime.sync.settings import SyncSettings
from torchrun_runtime.sync.workflow import Workflow
from unit.runtime.launching import SECONDS, measured

Json = dict[str, object]
TOKEN = "the job's"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return buffer.getvalue()


@dataclass
class Client:
    """A client of one server with a new connection for each request. proof: the upload token."""

    port: int
    proof: dict[str, str] = field(default_factory=lambda: {TOKEN_HEADER: TOKEN}, kw_only=True)

    def get(self, path: str = "/v1/upload") -> Json:
        return self.request("GET", path)[1]

    def put(
        self, data: bytes, start: int = 0, end: int | None = None, sha256: str = ""
    ) -> tuple[int, Json]:
        """Send the bytes from `start` to before `end` of the whole archive `data`."""
        piece = data[start:end]
        headers: Json = {
            "Content-Range": f"bytes {start}-{start + len(piece) - 1}/{len(data)}",
            "X-Torchrun-Sha256": sha256 or digest(data),
        }
        return self.request("PUT", "/v1/upload", piece, headers)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Json | None = None
    ) -> tuple[int, Json]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        shown = {k: str(v) for k, v in (headers or {}).items()}
        try:
            connection.request(method, path, body, self.proof | shown)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def begin(self, data: bytes, start: int = 0, send: int = 0) -> http.client.HTTPConnection:
        """Announce the bytes from `start` on, send the first `send`, and leave the connection open."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        connection.putrequest("PUT", "/v1/upload")
        connection.putheader("Content-Length", str(len(data) - start))
        connection.putheader("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        connection.putheader("X-Torchrun-Sha256", digest(data))
        for name, value in self.proof.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(data[start : start + send])
        return connection

    def until(self, *states: str) -> Json:
        """Poll until the server is in one of `states`; bounded by the test's own timeout."""
        while True:
            body = self.get()
            if body["state"] in states:
                return body
            time.sleep(0.01)


@dataclass
class Pod(Client):
    """A sync pod in a thread. result: the marker or the error that it ended with."""

    server: UploadServer
    result: list[Marker | SyncError] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.Thread)

    def set_read_timeout(self, seconds: float) -> None:
        """Of the reads that begin from now on."""
        self.server._handlers._read_timeout = seconds

    def end(self) -> Marker | SyncError:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.result[0]


@contextmanager
def pod(settings: SyncSettings) -> Iterator[Pod]:
    """A sync pod without its signals: claim, upload, server and extraction."""
    claim = Claim(settings.directory)
    claim.prepare()
    workflow = receive.open_workflow(settings, claim)
    with listening(settings, workflow) as server:
        running = Pod(server.port, server)

        def work() -> None:
            try:
                running.result.append(receive.take_until_good(settings, claim, workflow))
            except SyncError as error:
                workflow.fail(error.reason, error.message)
                running.result.append(error)

        running.thread = threading.Thread(target=work, daemon=True)
        running.thread.start()
        yield running


def listening(settings: SyncSettings, workflow: Workflow, host: str = "127.0.0.1") -> UploadServer:
    """A server on a port of its own; not started yet."""
    authorization = Authorization(settings.token_sha256, settings.sha256)
    return UploadServer(host, 0, workflow, settings.read_timeout, authorization)


@dataclass
class Process(Client):
    """torchrun-sync as a process of its own."""

    process: "subprocess.Popen[str]"
    termination_log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def end(self) -> tuple[int, Json]:
        code = self.process.wait(SECONDS)
        return code, json.loads(self.termination_log.read_text() or "{}")

    def event(self, name: str) -> Json:
        """Read log lines up to the event; all of them are JSON."""
        assert self.process.stdout
        for line in self.process.stdout:
            body: Json = json.loads(line)
            if body["event"] == name:
                return body
        raise AssertionError(f"ended without {name}")


@contextmanager
def process(directory: Path, *prefix: str, **environment: str) -> Iterator[Process]:
    """Start torchrun-sync on a claim; it is killed at the end if it still runs."""
    log = directory / "termination-log"
    log.write_text("")
    started = subprocess.Popen(
        [*prefix, sys.executable, "-m", "torchrun_runtime.sync"],
        env={
            **os.environ,
            "TORCHRUN_SYNC_DIR": str(directory / "claim"),
            "TORCHRUN_SYNC_PORT": "0",
            "TORCHRUN_SYNC_HOST": "127.0.0.1",
            "TORCHRUN_SYNC_UPLOAD_TOKEN_SHA256": digest(TOKEN.encode()),
            "TORCHRUN_TERMINATION_LOG": str(log),
            **measured(),
            **environment,
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    running = Process(0, started, log)
    try:
        yield running
    finally:
        running.kill()
        if started.stdout:
            started.stdout.close()


def settings(directory: Path, **changes: object) -> SyncSettings:
    """Settings for a claim in `directory`, without a linger time."""
    directory.mkdir(exist_ok=True)
    settings = SyncSettings(directory=directory, linger=0.0, token_sha256=digest(TOKEN.encode()))
    return replace(settings, **changes)  # type: ignore[arg-type]


SMALL_DISK = ["unshare", "--mount", "sh", "-c"]


def _may_mount() -> bool:
    try:
        probe = [*SMALL_DISK, "mount -t tmpfs none /mnt"]
        return subprocess.run(probe, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


needs_mount = pytest.mark.skipif(not _may_mount(), reason="a small disk needs the right to mount")


def on_small_disk(directory: Path, size: str) -> list[str]:
    mount = f'mount -t tmpfs -o size={size} none {directory}/claim && exec "$@"'
    return [*SMALL_DISK, mount, "sh"]


@contextmanager
def small_disk(directory: Path, options: str) -> Iterator["SmallDisk"]:
    """A tmpfs with these options at `directory`/claim, for several processes."""
    mount = f"mount -t tmpfs -o {options} none {directory}/claim && echo && exec cat"
    holder = subprocess.Popen(
        [*SMALL_DISK, mount], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin
    assert holder.stdout
    try:
        assert holder.stdout.readline()
        yield SmallDisk(holder.pid, directory / "claim")
    finally:
        holder.stdin.close()
        holder.wait(SECONDS)
        holder.stdout.close()


class SmallDisk(NamedTuple):
    """A file system that only processes with this prefix see. holder: keeps it."""

    holder: int
    path: Path

    @property
    def prefix(self) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self.holder}/ns/mnt", f"--wdns={os.getcwd()}"]

    @property
    def root(self) -> Path:
        """Its path for this process."""
        return Path(f"/proc/{self.holder}/root{self.path}")

    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()}

    def fill(self, directory: Path) -> None:
        """Create empty files until there is no inode left."""
        directory.mkdir(parents=True)
        for number in range(os.statvfs(directory).f_favail):
            (directory / str(number)).touch()


def read_tree(settings: SyncSettings, marker: Marker) -> dict[str, bytes]:
    """The files of a revision in the PVC, by path."""
    root = Claim(settings.directory).tree(marker.revision)
    files = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            assert not path.is_symlink()
            files[str(path.relative_to(root))] = path.read_bytes()
    return files


def fetch_failure(settings: SyncSettings) -> SyncError:
    """Fetch, which fails and leaves nothing in the PVC; returns the error."""
    with pytest.raises(SyncError) as caught:
        fetch(settings)
    assert Claim(settings.directory).marker() is None
    left = {path.name for path in settings.directory.iterdir()}
    assert left <= {"state", "env"}, "a failure leaves no files"
    return caught.value
