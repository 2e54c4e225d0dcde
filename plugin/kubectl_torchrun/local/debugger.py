"""The helper of the debugger for a run on this machine."""

import sys
from pathlib import Path

from kubectl_torchrun.cluster.debugger import DebugRequest
from kubectl_torchrun.errors import UsageProblem
from torchrun_runtime.launch import stacks


def helper_command(request: DebugRequest) -> list[str]:
    """Return the command that starts the helper. Raises UsageProblem if nothing of the run runs."""
    if not stacks.commands(request.job):
        raise UsageProblem(f"No process of the run {request.job} is running on this machine.")
    launcher = str(Path(stacks.__file__).parent)
    return [sys.executable, launcher, *request.arguments, request.job]
