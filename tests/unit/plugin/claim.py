"""The state directory of a job. kubectl is real, but `exec` runs its command on this machine."""

import os
import shutil
from pathlib import Path

import pytest

from kubectl_torchrun.logs import copies, reader_pod

from .laptop import Laptop

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
