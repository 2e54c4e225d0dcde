"""Find torchrun in the user's image."""

from __future__ import annotations

import shutil
import subprocess
import sys

from .command import Run
from .errors import LaunchError

_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
_PROBE_SECONDS = 60


def python() -> str:
    """The image's `python` or `python3`; else the one that runs the launcher."""
    return shutil.which("python") or shutil.which("python3") or sys.executable


def argv(run: Run) -> list[str]:
    """The whole command line. torchrun reads nodes and rendezvous from PET_*.

    Raises LaunchError (TorchMissing) if the image has no torch.
    """
    if not run.under_torchrun:
        return run.argv
    program = shutil.which("torchrun")
    if program:
        return [program, "--no-python", *run.argv]
    interpreter = shutil.which(run.interpreter or python()) or python()
    if not _has_torch(interpreter):
        raise LaunchError(
            "TorchMissing",
            f"The image has no torch: torchrun is not on PATH and {interpreter} cannot import"
            " torch. Use an image with PyTorch, or set launcher: none to run the command without"
            " torchrun.",
        )
    return [interpreter, "-m", "torch.distributed.run", "--no-python", *run.argv]


def _has_torch(interpreter: str) -> bool:
    try:
        probe = [interpreter, "-c", _HAS_TORCH]
        return subprocess.run(probe, timeout=_PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
