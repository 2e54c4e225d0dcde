"""What the launcher adds to the environment of the command."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Mapping

from . import contract
from .stacks import STACK_SIGNAL


def make_reports_folder() -> str:
    """A directory that the command's processes can write to; "" if there is none."""
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="torchrun-launch-")
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="reports-", dir=beside)
    return ""


def environment_of_command(
    environment: Mapping[str, str], reports: str, stacks: bool
) -> dict[str, str]:
    """The pod's environment, with unbuffered output and with Python's reports of exceptions."""
    hooks = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank")
    path = environment.get("PYTHONPATH", "")
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "SPT_NOENV": "1",  # setproctitle must not overwrite /proc/PID/environ, see processes.ranks
        **environment,
        "PYTHONPATH": os.pathsep.join([hooks, path] if path else [hooks]),
        contract.LAUNCH_REPORTS: reports,
        **({contract.STACK_SIGNAL: str(int(STACK_SIGNAL))} if stacks else {}),
    }
