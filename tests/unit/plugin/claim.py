"""The state directory of a job. kubectl is real, but `exec` runs its command on this machine."""

import os
import shutil
from pathlib import Path

import pytest

from kubectl_torchrun.logs import copies, reader_pod

from .laptop import Laptop

ENDED = {"startTime": "2026-01-01T00:00:00Z", "phase": "Failed", "attempt": 1}
SHIM = """#!/bin/sh
for word in "$@"; do
  if [ "$word" = exec ]; then
    echo "$@" >> "{log}"
    while [ "$1" != -- ]; do shift; done
    shift
    exec "$@"
  fi
done
exec {kubectl} "$@"
"""


@pytest.fixture
def claim(laptop: Laptop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory, at the path where pods mount it, on the bound PVC of job `run`."""
    laptop.server.put(
        "persistentvolumeclaims",
        "run-workspace",
        spec={"accessModes": ["ReadWriteMany"]},
        status={"phase": "Bound"},
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    shim = programs / "kubectl"
    shim.write_text(SHIM.format(log=tmp_path / "execs", kubectl=shutil.which("kubectl")))
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    root = tmp_path / "claim"
    state = root / "state"
    (state / "logs" / "0").mkdir(parents=True)
    monkeypatch.setattr(copies, "STATE", str(state))
    monkeypatch.setattr(reader_pod, "CLAIM", str(root))
    return state


def write(claim: Path, node: int, *lines: str, attempt: int = 0, older: str = "") -> None:
    path = claim / "logs" / str(attempt) / f"node-{node}.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    if older:
        path.with_name(f"node-{node}.log.1").write_text(older)


def play_kubelet(laptop: Laptop, **status: object) -> list[dict[str, object]]:
    """Give new pods this status. Returns the new pods."""
    reader_pods: list[dict[str, object]] = []
    put = laptop.server.put

    def create(plural: str, name: str, **parts: object) -> None:
        if plural == "pods" and name.startswith("run-log-reader-") and "spec" in parts:
            reader_pods.append(parts)
            parts["status"] = status
        put(plural, name, **parts)

    laptop.server.put = create  # type: ignore[method-assign]
    return reader_pods


def remaining_readers(laptop: Laptop) -> list[str]:
    return [name for _, name in laptop.server.objects if "log-reader" in name]
