"""Whom to preempt, so that a head fits: as few as do.

Within a queue the least important leaves first, then the youngest. Priorities of different queues
are not compared, as the users of each queue set them: there the youngest goes first.

Two kinds of jobs may have to leave: those of lower priority in the head's own queue; and, where the
head stays within its queue's own quota, those of queues that borrow from its cohort, as long as
they borrow. What is being preempted already leaves first: nobody new goes for what it frees.
"""

import heapq
from collections.abc import Iterator

from torchrun_controller.reconcile.admission.board import Ask, Held
from torchrun_controller.reconcile.admission.room import Placement
from torchrun_controller.reconcile.admission.shadow import Reservations


class Freed:
    """What a head will have: its nodes, and who has to leave for it that does not yet."""

    def __init__(self, placement: Placement, victims: list[Held]) -> None:
        self.placement = placement
        self.victims = victims


def find(reservations: Reservations, ask: Ask, *, fresh: bool = True) -> Freed | None:
    """Room that the ask has once others left; None if there is none, or it has it already.

    Not `fresh`: only with what those leave that are being preempted already.
    """
    search = _Search(reservations, ask)
    try:
        already = search.fits()
        for held in reservations.board.leaving:
            search.leave(held)
        victims = search.victims() if fresh or search.fits() else None
        if already or victims is None:
            return None
        return Freed(search.trial.place(), victims)
    finally:
        search.undo()


class _Search:
    """Tries it out: on a copy of the room, and on the accounts as they are, which `undo` mends."""

    def __init__(self, reservations: Reservations, ask: Ask) -> None:
        self.board = reservations.board
        self.ask = ask
        self.trial = reservations.trial(ask)
        self._gone: list[Held] = []

    def leave(self, held: Held) -> None:
        self.trial.leave(held)
        if held.line is not None:
            held.line.account.take(held.need, -1)
        self._gone.append(held)

    def stay(self, held: Held) -> None:
        assert held.line is not None
        self.trial.leave(held, 1)
        held.line.account.take(held.need)
        self._gone.remove(held)

    def undo(self) -> None:
        for held in self._gone:
            if held.line is not None:
                held.line.account.take(held.need)

    def fits(self) -> bool:
        return self.ask.line.account.lacks(self.ask.need) is None and self.trial.fits()

    def victims(self) -> list[Held] | None:
        """Who has to leave beyond those that do already; None if that is not enough."""
        chosen: list[Held] = []
        candidates = self._candidates()
        while not self.fits():
            held = next(candidates, None)
            if held is None:
                return None
            self.leave(held)
            chosen.append(held)
        # Some may have left for nothing: the next one freed all that was missing.
        for held in reversed(chosen[:-1]):
            self.stay(held)
            if self.fits():
                chosen.remove(held)
            else:
                self.leave(held)
        return chosen

    def _candidates(self) -> Iterator[Held]:
        own = self.ask.line
        everywhere = own.account.lacks(self.ask.need) is not None
        if not own.account.borrows(self.ask.need):
            for held in self._of_cohort():
                assert held.line is not None
                if self._useful(held, everywhere) and any(held.line.account.beyond()):
                    yield held
        lower = [held for held in own.held if held.request.priority < self.ask.request.priority]
        for held in sorted(lower, key=worth):
            if self._useful(held, everywhere):
                yield held

    def _of_cohort(self) -> Iterator[Held]:
        """Jobs of the other queues of the cohort, each queue's in the order of their worth."""
        own = self.ask.line
        lines = [line for line in self.board.lines if line.account.cohort is own.account.cohort]
        queues = [sorted(line.held, key=worth) for line in lines if line is not own]
        # The youngest of the first of each queue, whatever comes behind it there.
        return heapq.merge(*queues, key=youngest)

    def _useful(self, held: Held, everywhere: bool) -> bool:
        members = self.ask.shape.pool.members
        stays = held.leaving or held.request.gone
        return not stays and (everywhere or not members.isdisjoint(held.placement))


def worth(held: Held) -> tuple[int, float, str]:
    """The order in which jobs of a queue have to leave: lowest priority, then youngest."""
    return held.request.priority, *youngest(held)


def youngest(held: Held) -> tuple[float, str]:
    """The order in which jobs of several queues have to leave."""
    return -held.since, held.request.uid
