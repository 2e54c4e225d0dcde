"""A stop or a save at a call of torchrun_progress.stopping() on which all ranks of the gang agree.

While every rank of this node calls stopping(), the launcher holds back SIGTERM and asks the leader
of the gang for a stop (`gang.stopping`). If the gang agrees, the ranks get the answer at the same
call, and the launcher only waits for their ends. Otherwise SIGTERM is forwarded at once, or after
half of the grace period. A file in the folder of reports asks for a save: see `save`.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from typing import NamedTuple

from .gang.ballot import Ballot, Slot, read_slot
from .gang.messages import StopRound
from .gang.rounds import Rounds
from .gang.stopping import COMMITTED, SAVE, STOP, Agreement
from .output import say
from .processes import find, signal_name
from .rank._torchrun_stopping import CONTROL, CONTROL_BYTES, DEADLINE, OWNER, SLOT, SLOT_BYTES, WORD
from .save import SaveRequests
from .supervise import PlannedEnd

_KUBELET_GRACE = 25.0  # if nobody tells the launcher: the default of Kubernetes, less 5 s
_SHORTEST_GRACE = 1.0  # in less, no gang agrees


class Stopped(NamedTuple):
    """The end of the ranks by agreement.

    was_asked: this pod, or else that of another node. was_told: a rank of this node, or else all
    were killed before they reached the call.
    """

    call: int
    was_asked: bool
    was_told: bool


class SharedMemory:
    """What the launcher shares with the ranks of its node, in a folder. Raises OSError."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        path = os.path.join(folder, CONTROL)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, CONTROL_BYTES)
            self._control = memoryview(mmap.mmap(descriptor, CONTROL_BYTES)).cast("Q")
        finally:
            os.close(descriptor)
        self._slots: dict[str, memoryview] = {}

    def read(self) -> list[Slot] | str:
        """The calls of all ranks, or why not all of them take part."""
        self._find_slots()
        running = [words for words in self._slots.values() if find(words[OWNER] >> 32)]
        expected = max((words[OWNER] & 0xFFFFFFFF for words in running), default=0)
        slots = [read_slot(words) for words in running]
        if not slots or len(slots) != expected or not all(slot.call for slot in slots):
            return "not every rank has called torchrun_progress.stopping()"
        return slots

    def write(self, word: int, deadline: float) -> None:
        """Write the agreement. deadline: on the monotonic clock."""
        self._control[DEADLINE] = int(deadline * 1e9)
        self._control[WORD] = word

    def have_been_told(self) -> bool:
        """Whether a rank has got the answer to stop."""
        self._find_slots()
        return any(read_slot(words).was_told for words in self._slots.values())

    def _find_slots(self) -> None:
        with suppress(OSError):
            for name in os.listdir(self._folder):
                if name.startswith(SLOT) and name not in self._slots:
                    with suppress(OSError, ValueError):
                        self._slots[name] = _map(os.path.join(self._folder, name))


def _map(path: str) -> memoryview:
    """The words of a slot. Raises ValueError while its rank has not made it."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), SLOT_BYTES, access=mmap.ACCESS_READ)).cast("Q")


class PlannedStop:
    """The part of one node in the agreements of a round. Raises OSError.

    folder: of reports. grace: seconds that the ranks have after SIGTERM.
    """

    def __init__(self, rounds: Rounds, number: int, folder: str, grace: float | None) -> None:
        self._rounds = rounds
        self._memory = SharedMemory(folder)
        self._ballot = Ballot(number, self._memory)
        self._vote = self._ballot.vote
        self._grace = _KUBELET_GRACE if grace is None else grace
        self._is_unlimited = grace is None
        self._saves = SaveRequests(folder)
        self._held: int | None = None  # a signal
        self._followed: Agreement | None = None

    @property
    def is_urgent(self) -> bool:
        """Whether to call `look` again within milliseconds."""
        return self._ballot.is_active

    def hold(self, number: int) -> bool:
        """Whether a signal that asks the pod to end is held back: then the gang is asked."""
        if self._grace < _SHORTEST_GRACE or isinstance(self._memory.read(), str):
            return False
        self._held = number
        say(f"holding back {signal_name(number)}: all ranks stop together at their next calls")
        self._ballot.want_stop(self._grace, time.monotonic())
        return True

    def look(self) -> PlannedEnd | None:
        """Follow the agreement of the gang. What the command is to do now; None to go on."""
        now = time.monotonic()
        if self._saves.is_asked():
            self._ballot.want_save()
        self._ballot.follow(self._rounds.agreement(), now)
        if self._ballot.vote != self._vote:
            self._vote = self._ballot.vote
            self._rounds.vote(self._vote)
        known = self._ballot.known
        if known is not None and known != self._followed:
            self._followed = known
            self._report(known)
        if self._ballot.deadline is not None:
            return PlannedEnd(signals=False, seconds=max(self._ballot.deadline - now, 0.0))
        if self._held is None:
            return None
        why = self._ballot.forwards(now)
        if not why and isinstance(self._rounds.stop_order(), StopRound):
            why = "the round ends"
        if not why:
            return None
        say(f"the ranks do not stop together: {why}")
        self._ballot.withdraw()
        seconds = self._ballot.seconds_left(now)
        return PlannedEnd(signals=True, seconds=None if self._is_unlimited else seconds)

    def stopped(self) -> Stopped | None:
        """How the ranks have ended, if one of them has got the answer, or all were killed."""
        known, deadline = self._ballot.known, self._ballot.deadline
        if known is None or deadline is None:
            return None
        told = self._memory.have_been_told()
        if not told and time.monotonic() < deadline:
            return None
        return Stopped(known.call, was_asked=self._held is not None, was_told=told)

    def have_been_told(self) -> bool:
        """Whether a rank of this node has got the answer to stop."""
        return self._memory.have_been_told()

    def _report(self, agreement: Agreement) -> None:
        if agreement.kind == SAVE:
            self._saves.report(agreement)
        elif (agreement.kind, agreement.state) == (STOP, COMMITTED):
            say(f"all ranks stop at call {agreement.call} of torchrun_progress.stopping()")


def open_planned_stop(
    rounds: Rounds, number: int, folder: str, grace: float | None
) -> PlannedStop | None:
    """The part of this node in planned stops; None if the folder cannot be shared."""
    if not folder:
        return None
    with suppress(OSError):
        return PlannedStop(rounds, number, folder, grace)
    return None
