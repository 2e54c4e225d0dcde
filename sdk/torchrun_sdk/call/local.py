"""A call under torchrun on this machine, by `run --local` of the plugin: without a cluster."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchrun_sdk.call.gang import write_overlay
from torchrun_sdk.call.monitor import Line
from torchrun_sdk.call.reattach import outcome
from torchrun_sdk.cluster.kubectl import NO_DEFAULTS, PLUGIN_USAGE, Child, find_plugin, reason
from torchrun_sdk.cluster.manifest import build
from torchrun_sdk.compute import Compute
from torchrun_sdk.errors import CallTimeout, ClusterError, JobFailed, UsageError
from torchrun_sdk.spec import (
    CALL_FILE,
    ENTRY,
    FOLDER,
    RESULTS,
    Call,
    Exited,
    Frame,
    Raised,
    Result,
    Started,
    decode,
)

# With one of these devices the machine has GPUs.
_GPUS = ("/dev/nvidia0", "/dev/kfd")


def run(
    name: str, compute: Compute, root: Path, call: Call, timeout: float | None, line: Line | None
) -> list[Result]:
    """Run the call on each worker of the compute, one rank each: the results, sorted by rank.

    Without GPUs nccl becomes gloo. timeout: of the whole call. Raises UsageError, CallError.
    """
    try:
        plugin = find_plugin()
    except ClusterError as error:
        raise UsageError(str(error)) from error
    call = call._replace(idle=0.0, cpu_only=call.cpu_only or not any(map(os.path.exists, _GPUS)))
    with tempfile.TemporaryDirectory(prefix="torchrun-sdk-") as temporary:
        folder, status_file = Path(temporary, FOLDER), Path(temporary, "status")
        write_overlay(folder, call)
        words = ["python3", str(folder / ENTRY), "call", str(folder / CALL_FILE), str(root)]
        body = build(name, compute)
        body["spec"]["command"] = shlex.join(words)
        # Ranks have the Python of this program, whose packages the function may import.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        command = ["env", f"PATH={path}", plugin, NO_DEFAULTS, "run", "--local"]
        command += ["--gpus-per-node=1", f"--directory={root}", f"--status-file={status_file}"]
        _follow([*command, "--filename=-"], body, timeout, line, status_file)
        status = json.loads(status_file.read_text(encoding="utf-8"))
        return outcome(name, status, _frames(folder / RESULTS / call.id))


def _follow(
    command: list[str],
    body: dict[str, Any],
    timeout: float | None,
    line: Line | None,
    status_file: Path,
) -> None:
    """Run the plugin to its end. Raises CallTimeout; UsageError, JobFailed without a status."""
    name = body["metadata"]["name"]

    def take(text: str) -> None:
        if line is not None:
            line(text)

    child = Child(command, take)
    try:
        child.send(json.dumps(body))
        child.close_stdin()
        if not child.wait(timeout):
            raise CallTimeout(f"{name} did not return within {timeout:g} s.", job=name)
        code, why = child.exit_code(), reason(child.stderr_tail())
    finally:
        child.close()
    if code == PLUGIN_USAGE:
        raise UsageError(why)
    if not status_file.exists():
        raise JobFailed(f"{name}: {why}", reason="LocalRunFailed", job=name)


def _frames(folder: Path) -> list[Frame]:
    """What the ranks wrote: the start of each before its end."""
    paths = [*folder.glob("*.started"), *folder.glob("*.left")]
    messages = [decode(path.read_text(encoding="utf-8")) for path in paths]
    return [frame for frame in messages if isinstance(frame, (Started, Result, Raised, Exited))]
