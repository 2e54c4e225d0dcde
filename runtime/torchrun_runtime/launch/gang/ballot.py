"""How a node votes on an agreement, by what the calls of its ranks show. Pure.

See `stopping` for the agreement and rank/_torchrun_stopping.py for the calls of a rank.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Sequence

from ..rank._torchrun_stopping import (
    CALL,
    ENTERED,
    KEPT_TIMES,
    LEFT,
    NONE,
    SAVES,
    STOPS,
    TIMES,
    TOLD,
    pack_word,
)
from ..rank._torchrun_stopping import PROPOSED as PROPOSED_WORD
from .stopping import (
    ACCEPTS,
    ASKED,
    COMMITTED,
    DECLINES,
    DONE,
    HOLD_PART,
    PROPOSED,
    REACHED,
    REFUSED,
    SAVE,
    STOP,
    Agreement,
    Vote,
)

# Until the stores of ranks that have not seen a proposal arrive.
FENCE_SECONDS = 0.001
_SHORTEST_STEP = 1e-6
_ORDER = {ASKED: 0, PROPOSED: 1, COMMITTED: 2, REFUSED: 2, DONE: 3}


class Slot(NamedTuple):
    """The newest call of a rank, its phase, and when the newest calls were entered, in seconds."""

    call: int
    phase: int
    times: tuple[float, ...]

    @property
    def was_told(self) -> bool:
        """Whether the rank has got the answer to stop."""
        return self.phase == TOLD

    def has_passed(self, call: int) -> bool:
        """Whether the rank has gone on from this call."""
        return self.call > call or (self.call == call and self.phase == LEFT)


def read_slot(words: Sequence[int]) -> Slot:
    """The slot in these words. The oldest time is left out: the next call may be writing there."""
    count, phase = words[CALL] >> 2, words[CALL] & 3
    first = max(count - KEPT_TIMES + 2, 1)
    times = (words[TIMES + call % KEPT_TIMES] / 1e9 for call in range(first, count + 1))
    return Slot(count, phase, tuple(times))


class Memory(Protocol):
    """What the launcher shares with the ranks of its node."""

    def read(self) -> list[Slot] | str:
        """The calls of all ranks, or why not all of them take part."""

    def write(self, word: int, deadline: float) -> None:
        """Write the agreement. deadline: of a stop, on the clock of the slots."""


class Ballot:
    """The vote of this node in one round, which the caller sends after each change."""

    def __init__(self, number: int, memory: Memory) -> None:
        self.vote = Vote(number)
        self._memory = memory
        self._known: Agreement | None = None
        self._written_at = 0.0
        # Of the grace period of this pod, and of the part in which it holds back SIGTERM.
        self._end = self._held_until = float("inf")
        self.deadline: float | None = None  # of a stop that was committed
        self.is_in_doubt = False  # a rank waited in vain for the commit, and has gone on

    @property
    def known(self) -> Agreement | None:
        """The newest agreement that this node has followed."""
        return self._known

    def want_stop(self, seconds: float, now: float) -> None:
        """Vote for a stop. seconds: until the ranks are killed."""
        self._end, self._held_until = now + seconds, now + seconds * HOLD_PART
        self.vote = self.vote._replace(wants=STOP, seconds=seconds)

    def want_save(self) -> None:
        """Vote for a save, unless a stop is wanted."""
        if not self.vote.wants:
            number = self._known.number if self._known else 0
            self.vote = self.vote._replace(wants=SAVE, after=number)

    def forwards(self, now: float) -> str:
        """Why this node, which wants a stop, waits for it no more; "" while it does."""
        known = self._known
        if self.is_in_doubt:
            return "the leader was not reachable"
        if known is not None and known.kind == STOP and known.state == REFUSED:
            return known.why
        return "there is no agreement" if now >= self._held_until else ""

    def seconds_left(self, now: float) -> float:
        """Until the end of the grace period of this pod."""
        return max(self._end - now, 0.0)

    def withdraw(self) -> None:
        """Let the ranks go on: this node forwards SIGTERM."""
        self._write(NONE)

    def follow(self, agreement: Agreement | None, now: float) -> None:
        """Write the agreement for the ranks, and vote on it. Call it again while `is_active`."""
        if agreement is not None and agreement.round == self.vote.round:
            known = self._known
            if known is None or _age(known) < _age(agreement):
                self._known = agreement
                self._take(agreement, now)
        self._judge(now)

    @property
    def is_active(self) -> bool:
        """Whether a proposal is to be judged soon."""
        known = self._known
        return known is not None and known.state == PROPOSED and not self.vote.verdict

    @property
    def _awaits_save(self) -> bool:
        known = self._known
        is_save = known is not None and (known.kind, known.state) == (SAVE, COMMITTED)
        return is_save and self.vote.verdict != REACHED

    def _take(self, agreement: Agreement, now: float) -> None:
        if agreement.state == ASKED:
            self._write(NONE)
            self.vote = self._answer(agreement, now)
        elif agreement.state == PROPOSED:
            self._write(PROPOSED_WORD)
            self._written_at = now
        elif agreement.state == COMMITTED:
            self._commit(agreement, now)
        else:
            self._write(NONE)
        if not agreement.is_open and self.vote.wants == SAVE:
            self.vote = self.vote._replace(wants="")

    def _commit(self, agreement: Agreement, now: float) -> None:
        slots = self._memory.read()
        if isinstance(slots, list) and any(slot.has_passed(agreement.call) for slot in slots):
            self.is_in_doubt = True
            self._write(NONE)
        elif agreement.kind == SAVE:
            self._write(SAVES)
        else:
            self.deadline = min(self._end, now + agreement.seconds)
            self._write(STOPS)

    def _judge(self, now: float) -> None:
        known = self._known
        if known is None or not (self.is_active or self._awaits_save):
            return
        if now - self._written_at < FENCE_SECONDS:
            return
        slots = self._memory.read()
        if known.state == COMMITTED:
            # A rank that has ended reaches nothing any more.
            if isinstance(slots, str) or all(slot.has_passed(known.call) for slot in slots):
                self.vote = self.vote._replace(verdict=REACHED)
            return
        if isinstance(slots, str) or any(slot.has_passed(known.call) for slot in slots):
            self._write(NONE)
            self.vote = self.vote._replace(verdict=DECLINES)
        elif not any((s.call, s.phase) == (known.call, ENTERED) for s in slots):
            self.vote = self.vote._replace(verdict=ACCEPTS)

    def _answer(self, agreement: Agreement, now: float) -> Vote:
        vote = self.vote
        vote = Vote(vote.round, vote.wants, vote.seconds, vote.after, agreement.number)
        slots = self._memory.read()
        if isinstance(slots, str):
            return vote._replace(obstacle=slots)
        answers = [_predict(slot, agreement.margin, now) for slot in slots]
        earliest = max(call for call, _, _ in answers)
        expected = max(wait + (earliest - call) * step for call, wait, step in answers)
        step = max(step for _, _, step in answers)
        return vote._replace(earliest=earliest, expected=expected, step=step)

    def _write(self, state: int) -> None:
        if self._known is not None:
            word = pack_word(self._known.number, self._known.call, state)
            self._memory.write(word, self.deadline or 0.0)


def _age(agreement: Agreement) -> tuple[int, int]:
    return agreement.number, _ORDER[agreement.state]


def _predict(slot: Slot, margin: float, now: float) -> tuple[int, float, float]:
    """The earliest call that the rank does not make within the margin, the seconds until then.

    And those of a step: the median of the newest ones, one of which may have written a checkpoint.
    """
    times = slot.times
    elapsed = now - times[-1] if times else 0.0
    steps = [later - earlier for earlier, later in zip(times, times[1:])]
    step = max(sorted(steps)[len(steps) // 2], _SHORTEST_STEP) if steps else 0.0  # not known
    soon = min(elapsed, step) + margin
    call = slot.call + 1 + int(soon / (step or soon))
    return call, max((call - slot.call) * step - elapsed, 0.0), step
