"""The part of one rank in an agreement on a call of torchrun_progress.stopping().

Rank and launcher share memory: the rank writes its newest call into a slot, and the launcher writes
the agreement into a word. Each store and load is of 8 aligned bytes, which no other one splits.

A rank that enters a call writes that, and then reads the word. The launcher writes the word, waits
for a millisecond, in which the store of a rank that has not seen the word arrives, and then reads
the slots. So of both at least one sees the other: a rank that has entered the proposed call and
will not wait there is seen, and the launcher does not accept.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress

# Phases of a call in a slot.
ENTERED, WAITS, LEFT, TOLD = range(4)
# States in the word of the launcher.
NONE, PROPOSED, STOPS, SAVES = range(4)
# What follows from a look at the word.
GO_ON, WAIT, SAVE, STOP = range(4)
# How long a rank waits at the call of a proposal. The leader decides on it much sooner
# (gang.stopping.PROPOSAL_SECONDS). The rest is for a new connection (gang.leader.LOST_SECONDS).
WAIT_SECONDS = 20.0
_POLL = 0.001

# Of a slot, in words of 8 bytes: the process and the number of ranks on its node, the newest call,
# and in turns the times at which the newest calls were entered, in nanoseconds of a clock that all
# processes of the machine share.
OWNER, CALL, TIMES = 0, 1, 2
KEPT_TIMES = 8
SLOT_BYTES = 8 * (TIMES + KEPT_TIMES)
# Of the launcher: the agreement, and the time at which the grace period ends, as above.
WORD, DEADLINE = 0, 1
CONTROL_BYTES = 16
CONTROL = "stopping.control"
SLOT = "stopping.rank."
_CALL_MASK = (1 << 44) - 1


def pack_word(number: int, call: int, state: int) -> int:
    """The word of an agreement."""
    return (number & 0xFFFF) << 48 | (call & _CALL_MASK) << 4 | state


def pack_call(count: int, phase: int) -> int:
    """The newest call of a rank."""
    return count << 2 | phase


class Calls:
    """Counts the calls of this rank and follows the word of the launcher.

    slot, control: words of 8 bytes.
    """

    def __init__(self, slot: memoryview, control: memoryview) -> None:
        self._slot = slot
        self._control = control
        self._count = 0
        self.deadline = 0  # of the stop; 0 before it

    def enter(self, now: int) -> None:
        """Begin a call. now: in nanoseconds."""
        self._count += 1
        self._slot[TIMES + self._count % KEPT_TIMES] = now
        self._slot[CALL] = pack_call(self._count, ENTERED)

    def look(self) -> int:
        """What the present call does; WAIT: look again, or leave."""
        word = self._control[WORD]
        state = word & 0xF
        if state == NONE or word >> 4 & _CALL_MASK != self._count:
            self._slot[CALL] = pack_call(self._count, LEFT)
            return GO_ON
        if state == STOPS and self._control[DEADLINE]:
            self.deadline = self._control[DEADLINE]
            self._slot[CALL] = pack_call(self._count, TOLD)
            return STOP
        if state == SAVES:
            self._slot[CALL] = pack_call(self._count, LEFT)
            return SAVE
        self._slot[CALL] = pack_call(self._count, WAITS)
        return WAIT

    def leave(self) -> None:
        """Go on, because the call has waited for too long."""
        self._slot[CALL] = pack_call(self._count, LEFT)


class RankCalls:
    """The calls of this process. Raises OSError or ValueError if it cannot take part."""

    def __init__(self, folder: str, rank: str) -> None:
        control = _map(os.path.join(folder, CONTROL), CONTROL_BYTES, 0)
        slot = _map(os.path.join(folder, SLOT + rank), SLOT_BYTES, os.O_CREAT)
        owner = slot[OWNER] >> 32
        if owner and _runs(owner):
            raise ValueError("another process of this rank takes part")
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        slot[CALL] = 0
        slot[OWNER] = os.getpid() << 32 | local_ranks
        self._calls = Calls(slot, control)
        self._pid = os.getpid()
        self.saves = False

    def call(self) -> float | None:
        """The seconds left until the end of the grace period; None to go on."""
        calls, now = self._calls, time.monotonic_ns()
        if os.getpid() != self._pid:  # a forked child
            return None
        if not calls.deadline:
            calls.enter(now)
            self.saves = False
            answer = calls.look()
            if answer == GO_ON:
                return None
            end = now + int(WAIT_SECONDS * 1e9)
            while answer == WAIT:
                if time.monotonic_ns() >= end:
                    calls.leave()
                    return None
                time.sleep(_POLL)
                answer = calls.look()
            self.saves = answer == SAVE
            if answer != STOP:
                return None
        return max((calls.deadline - time.monotonic_ns()) / 1e9, 0.0)


def _map(path: str, size: int, flags: int) -> memoryview:
    """The words of a file, which this process shares with others."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        if flags & os.O_CREAT:
            os.ftruncate(descriptor, size)
        return memoryview(mmap.mmap(descriptor, size)).cast("Q")
    finally:
        os.close(descriptor)


def _runs(pid: int) -> bool:
    if pid == os.getpid():
        return False
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False
