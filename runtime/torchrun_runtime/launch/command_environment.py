"""What the launcher adds to the environment of the command."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Mapping

from . import contract
from .stacks import STACK_SIGNAL

THREADS = "OMP_NUM_THREADS"
_SHARE = (contract.CPUS, contract.PET_NPROC_PER_NODE)


def make_reports_folder() -> str:
    """A directory that the command's processes can write to; "" if there is none."""
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="torchrun-launch-")
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="reports-", dir=beside)
    return ""


def default_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """OMP_NUM_THREADS, if it is not set: the CPUs that the pod requests, shared by its ranks.

    torchrun's own default is 1 thread for each of several ranks; without torchrun, one rank has a
    thread for each CPU of the machine, whatever its pod may use.
    """
    cpus, ranks = (environment.get(name, "") for name in _SHARE)
    if THREADS in environment or not (cpus.isdecimal() and ranks.isdecimal()) or cpus == "0":
        return {}
    return {THREADS: str(max(1, int(cpus) // max(1, int(ranks))))}


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
