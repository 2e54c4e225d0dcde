"""The memory that pods need for the largest workspace, next to the limits of their containers."""

import hashlib
import io
import os
import subprocess
import sys
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchrun_api.contract.contents import Entry, Manifest, pack
from torchrun_api.kinds.quantity import parse
from torchrun_controller.reconcile.objects import sync_pod
from torchrun_controller.reconcile.objects.sync_pod import SERVE_MEMORY
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.settings import ArchiveLimits
from unit.runtime.syncing import Json, digest, process

pytestmark = pytest.mark.long

SERVER = """
import sys
from pathlib import Path
from unit.runtime.serving import running, token
with running(Path(sys.argv[1])) as url:
    print(url, token(), flush=True)
    sys.stdin.read()
"""


def largest(change: str = "") -> dict[str, bytes]:
    """As many files as a workspace may have, with paths like those of installed packages."""
    folders = "site-packages/vendor{:02}/package_{:04}/subpackage_{:05}/module_with_a_name_{:07}.py"
    return {
        folders.format(n % 20, n % 500, n % 3000, n): f"{n}{change}".encode()
        for n in range(ArchiveLimits().entries)
    }


def manifest_of(files: dict[str, bytes]) -> Manifest:
    return Manifest(
        Entry(path, hashlib.sha256(content).hexdigest(), len(content), "644")
        for path, content in files.items()
    )


def peak(pid: int) -> int:
    """The most memory that the process has had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) << 10


def test_an_upload(tmp_path: Path):
    (tmp_path / "claim").mkdir()
    files = largest()
    manifest = manifest_of(files)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for path, content in files.items():
            opened.writestr(path, content)
    data = buffer.getvalue()
    with process(tmp_path) as running:
        running.port = int(str(running.event("listening")["port"]))
        headers: Json = {"X-Torchrun-Workspace": manifest.sha256}
        assert running.request("PUT", "/v1/manifest", pack(manifest), headers)[0] == 202
        running.until("waiting")
        headers["X-Torchrun-Sha256"] = digest(data)
        headers["Content-Range"] = f"bytes 0-{len(data) - 1}/{len(data)}"
        assert running.request("PUT", "/v1/upload", data, headers)[0] == 202
        running.until("done")
        used = peak(running.process.pid)
    assert used < 0.8 * parse(sync_pod.MEMORY)


def test_a_server_with_a_new_revision_and_many_workers(tmp_path: Path):
    claim = Claim(tmp_path)
    claim.prepare()
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        url, token = server.stdout.readline().split()
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{url}/v1/manifest", headers=headers)

        def fetch(_: int) -> int:
            with urllib.request.urlopen(request) as response:
                return len(response.read())

        for revision in (1, 2):
            claim.new.mkdir()
            claim.publish(manifest_of(largest("!" * revision)))
            with ThreadPoolExecutor(16) as workers:
                assert len(set(workers.map(fetch, range(16)))) == 1
        used = peak(server.pid)
        server.stdin.close()
    assert used < 0.8 * parse(SERVE_MEMORY)
