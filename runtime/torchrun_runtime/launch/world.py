"""Whether the ranks of a command train together, or each process trains alone.

A command that does not run under torchrun may start it, or mpirun, inside of a script. So the
launcher looks at what happens: rank/sitecustomize.py leaves a mark once a Python imports torch, and
another one once a process belongs to a group. A node sends both to the leader of its gang: a gang
in which some Python imported torch, and no process has a group on any node, trains alone.
"""

from __future__ import annotations

import os
import time
from typing import Callable

from .cause import Cause
from .contract import LAUNCH_FAILED
from .gang.messages import ALONE, TOGETHER
from .gang.rounds import Rounds
from .output import say, timestamp
from .processes import descendants, variable
from .supervise import StopRequest

# Files in the folder of reports, see rank/sitecustomize.py.
TORCH_MARK, WORLD_MARK = "saw.torch", "saw.world"
# How long after the import of torch the processes may need to form a group.
PATIENCE = 30.0
# Variables of torchrun and accelerate, Open MPI, MPICH and Intel MPI, Horovod.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE")
_ADVICE = (
    "Write the command as python train.py, or start torchrun in the script: it gets all nodes from"
    " the job. launcher: torchrun runs the command in every rank, launcher: none accepts it as it"
    " is."
)


class WorldWatch:
    """A watchdog that tells the leader of the gang what the processes of this node do.

    On the leader it also reports a gang that trains alone. It requests no stop: the group may still
    form. folder: of the marks. announce: gets True once the gang trains alone, False if that ends.
    """

    def __init__(self, rounds: Rounds, folder: str, announce: Callable[[bool], None]) -> None:
        self._rounds = rounds
        self._folder = folder
        self._announce = announce
        self._alone_since: float | None = None
        self._is_reported = False

    def check(self) -> StopRequest | None:
        """Look at the marks. Call it about every second, and at the end of the command."""
        self._rounds.note(self._read())
        now = time.monotonic()
        if not self._rounds.trains_alone():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        is_alone = self._alone_since is not None and now - self._alone_since >= PATIENCE
        if is_alone != self._is_reported:
            self._is_reported = is_alone
            if is_alone:
                say(f"Warning: each process trains alone. {_ADVICE}")
            self._announce(is_alone)
        return None

    def on_stop(self, *, leaving: bool) -> None:
        """Nothing to do."""

    def _read(self) -> str:
        if os.path.exists(os.path.join(self._folder, WORLD_MARK)):
            return TOGETHER
        if not os.path.exists(os.path.join(self._folder, TORCH_MARK)):
            return ""
        return TOGETHER if _has_world() else ALONE


def cause_of_training_alone() -> Cause:
    """The cause of a gang that has ended with 0, but did not train together."""
    message = (
        "The command imported torch, but no process had a WORLD_SIZE above 1 or a process group, so"
        f" each one trained alone. {_ADVICE}"
    )
    return Cause(LAUNCH_FAILED, None, None, "NotDistributed", message, timestamp())


def _has_world() -> bool:
    """Whether a process that leaves no marks is a rank: another program, or `python -I`."""
    return any(
        (variable(process.pid, name) or "").isdigit() and int(variable(process.pid, name) or 0) > 1
        for process in descendants(os.getpid())
        for name in _WORLD_SIZES
    )
