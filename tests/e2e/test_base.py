"""A second submit from one directory does not send files of the previous job again."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from e2e.manifests import queue
from e2e.space import Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import CLAIMS, PODS
from torchrun_api.names import WORKSPACE_BASE, workspace_claim

MIB = 1 << 20
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}
SHOWN = re.compile(r"Uploaded ([\d,]+) files?, ([\d.]+) ([KMG]?i?B)")
# Hashes the bytes and the executable bit of every path below the working directory.
DIGEST = """
import hashlib, os
def tree_digest(top):
    whole = hashlib.sha256()
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(files) or [""]:
            path = os.path.join(folder, name)
            entry = [os.path.relpath(path, top)]
            if name:
                content = hashlib.sha256()
                with open(path, "rb") as file:
                    while block := file.read(1 << 20):
                        content.update(block)
                entry += [content.hexdigest(), str(os.access(path, os.X_OK))]
            whole.update(ascii(entry).encode())
    return whole.hexdigest()
"""
TRAIN = DIGEST + 'print("tree", tree_digest("."), flush=True)\n'
RUN = "exec python3 train.py"


def tree_digest(top: Path) -> str:
    scope: dict[str, object] = {}
    exec(DIGEST, scope)
    digest = scope["tree_digest"]
    assert callable(digest)
    return str(digest(str(top)))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small directory, and a separate cache of the plugin."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = tmp_path / "project"
    (directory / "tools" / "empty").mkdir(parents=True)
    (directory / "train.py").write_text(TRAIN)
    (directory / "tools" / "grüße.sh").write_text("#!/bin/sh\n")
    (directory / "tools" / "grüße.sh").chmod(0o755)
    return directory


def grow(directory: Path, mib: int) -> None:
    """Add incompressible files of 4 MiB, and many small files."""
    noise = Random(1)
    for number in range(mib // 4):
        (directory / f"weights-{number}.bin").write_bytes(noise.randbytes(4 * MIB))
    (directory / "data").mkdir()
    for number in range(500):
        (directory / "data" / f"{number}.txt").write_text(f"sample {number}\n" * 20)


def edit(directory: Path) -> None:
    with (directory / "train.py").open("a") as file:
        file.write("# one line\n")


def submit(space: Space, directory: Path, name: str) -> tuple[int, int, float]:
    """Submit a job and check its files. Returns the sent files and bytes, and the seconds."""
    started = time.monotonic()
    ended = space.submit(directory, RUN, "--name", name, "--queue", "space")
    seconds = time.monotonic() - started
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"tree {tree_digest(directory)}" in ended.stdout
    found = SHOWN.search(ended.stderr)
    assert found, ended.stderr
    files, amount, unit = found.groups()
    return int(files.replace(",", "")), int(float(amount) * UNITS[unit]), seconds


def count(directory: Path) -> int:
    return sum(len({*files}) for _, _, files in os.walk(directory))


def spacious(space: Space, mib: int) -> None:
    size = f"{2 * mib + 64}Mi"
    storage = {
        "workspace": {"enabled": True, "size": size},
        "checkpoints": {"enabled": False},
    }
    space.apply(queue("space", space.cluster.controller, storage=storage))


@pytest.mark.long
@pytest.mark.parametrize("mib", [16, 200])
def test_only_an_edit_is_sent_to_the_next_job(space: Space, project: Path, mib: int) -> None:
    spacious(space, mib)
    grow(project, mib)
    files, sent, first = submit(space, project, "one")
    assert sent > mib * MIB
    edit(project)
    with space.history(PODS) as pods:
        again, rest, second = submit(space, project, "two")
        assert pods.until(base_of, name="two-sync-0") == "one"
    print(
        f"first {files} files, {sent} B, {first:.1f} s; then {again} files, {rest} B, {second:.1f} s"
    )
    assert again == 1
    assert rest < MIB


def base_of(pod: JsonObject) -> str:
    return pod["metadata"].get("annotations", {}).get(WORKSPACE_BASE, "")


@pytest.mark.long
def test_a_deleted_base_job_is_not_needed(space: Space, project: Path) -> None:
    spacious(space, 8)
    grow(project, 8)
    submit(space, project, "one")
    space.kubectl("delete", "torchrunjob", "one")
    space.kubectl("wait", f"pvc/{workspace_claim('one')}", "--for=delete", "--timeout=180s")
    edit(project)
    _, sent, seconds = submit(space, project, "two")
    print(f"without the job before: {sent} B, {seconds:.1f} s")
    assert sent > 8 * MIB


@pytest.mark.long
def test_an_unmountable_base_only_delays_the_sync(space: Space, project: Path) -> None:
    spacious(space, 8)
    grow(project, 8)
    submit(space, project, "one")
    labels = space.get(CLAIMS, workspace_claim("one"))["metadata"]["labels"]
    space.kubectl("delete", "torchrunjob", "one")
    space.kubectl("wait", f"pvc/{workspace_claim('one')}", "--for=delete", "--timeout=180s")
    edit(project)
    with unmountable(space, workspace_claim("one"), labels), space.history(PODS) as pods:
        _, sent, seconds = submit(space, project, "two")
        assert pods.until(base_of, name="two-sync-0") == "one"
    print(f"with a claim that cannot be mounted: {sent} B, {seconds:.1f} s")
    assert sent > 8 * MIB
    assert 20 < seconds < 90


@contextmanager
def unmountable(space: Space, name: str, labels: dict[str, str]) -> Iterator[None]:
    """A bound PVC whose volume is on no node."""
    volume = f"{space.name}-nowhere"
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": "/torchrun/nowhere", "type": "Directory"},
        "claimRef": {"namespace": space.name, "name": name},
    }
    claim = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": volume,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    meta = {"name": name, "labels": labels}
    space.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": spec,
        },
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": claim},
    )
    try:
        space.wait(f"pvc/{name}", "jsonpath={.status.phase}=Bound")
        yield
    finally:
        space.kubectl("delete", "pv", volume, "--wait=false")
