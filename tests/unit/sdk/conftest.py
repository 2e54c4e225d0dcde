"""Pods for tests. Each is a folder, and its processes end with the test."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from torchrun_sdk.cluster import kubectl
from torchrun_sdk.serialization import pack
from torchrun_sdk.spec import Call, Reference

from .pods import SECONDS, WAITS, Pod, delete_job


@pytest.fixture(autouse=True)
def _complete_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may pause the thread that reads the stderr of a program."""
    text = kubectl._Errors.text

    def complete_text(errors: kubectl._Errors, lines: int = kubectl._ERROR_LINES) -> str:
        errors._thread.join(SECONDS)
        return text(errors, lines)

    monkeypatch.setattr(kubectl._Errors, "text", complete_text)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    pods: list[Pod] = []

    def make(script: str, qualname: str = "f", *args: object, **options: Any) -> Pod:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        fields: dict[str, Any] = {
            "function": Reference(qualname, script="script.py"),
            "arguments": pack([args, {}], "json", "x"),
            "linger": WAITS,
            **options,
        }
        pods.append(Pod(tmp_path, Call("c1", **fields)))
        return pods[-1]

    yield make
    for process in (process for pod in pods for process in pod.started):
        process.terminate()  # a rank ends the process of its call
    for pod in pods:
        for process in pod.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a cluster, with its kubectl and plugin on PATH. See played_cluster.py."""
    root = tmp_path / "cluster"
    programs = tmp_path / "bin"
    for folder in (root / "pods", programs):
        folder.mkdir(parents=True)
    for name in ("kubectl", "kubectl-torchrun"):
        program = programs / name
        script = Path(__file__).with_name("played_cluster.py")
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} {name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLUSTER", str(root))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    for name in ("TORCHRUN_SDK_CPU_ONLY", "TORCHRUN_SDK_IMAGE", "TORCHRUN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    yield root
    delete_job(root)
    pids = root / "pids"
    for pid in pids.read_text().split() if pids.exists() else ():
        end_kubelet(int(pid), root)


def end_kubelet(pid: int, root: Path) -> None:
    """Kill a kubelet of played_cluster.py and its ranks. Another program may have its number by now."""
    with suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        # Empty once it has ended: its ranks may still be in its group.
        if environment and f"FAKE_CLUSTER={root}".encode() not in environment.split(b"\0"):
            return
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
