"""What is kept for a head that has to wait, and who may still go before it (EASY backfill).

The reservation is where and when the head fits at the latest: jobs are taken to leave in the order
of their deadlines, after them the oldest first. Before it goes who is over by then, or who needs
only what the head leaves over: no backfill makes it start later than its reservation says. Where a
job without a deadline has to leave first, that time is not known, and only what the head leaves
over is used. As room is expected from the oldest jobs, those that come later do not put it off.
"""

from collections.abc import Collection, Iterable
from math import inf

from torchrun_controller.reconcile.admission.board import Ask, Board, Held
from torchrun_controller.reconcile.admission.room import Placement, Room


class Shadow:
    """The reservation of one head: `seconds` from now, inf where the time is not known."""

    def __init__(self, ask: Ask, last: Held) -> None:
        self.ask = ask
        self.seconds = last.seconds
        self.last = last  # whose end makes the room complete


class Reservations:
    """The room of one decision: what is free now, and what still is once all heads have theirs."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.shadows: list[Shadow] = []
        self._later: Room | None = None
        self._both: Room | None = None
        self._left: set[str] = set()

    def over(self, ask: Ask) -> Shadow | None:
        """The first reservation on nodes that the ask could use."""
        return next((s for s in self.shadows if self.board.overlap(s.ask.shape, ask.shape)), None)

    def of(self, ask: Ask) -> bool:
        """Whether the ask has one."""
        return any(shadow.ask is ask for shadow in self.shadows)

    def reserve(self, ask: Ask) -> Shadow:
        """Keep room for the ask, which does not fit now, and would if nothing else ran.

        No other reservation may be on nodes that it could use.
        """
        later = (self._later or self.board.room).copy(ask.shape)
        last: Held | None = None
        members = ask.shape.pool.members
        leaving = sorted(self.board.held, key=lambda held: held.release)
        leaving = [held for held in leaving if not members.isdisjoint(held.placement)]
        for held in leaving:
            if held.request.uid in self._left:  # for another head, on nodes of both
                last = held
        for held in leaving:
            if later.capacity(ask.shape) >= ask.slots:
                break
            if held.request.uid not in self._left:
                later.take(held.shape, held.placement, -1)
                self._left.add(held.request.uid)
                last = held if last is None else max(last, held, key=lambda held: held.release)
        placement = later.place(ask.shape, ask.slots)
        assert last is not None
        later.take(ask.shape, placement)
        self._later = later
        self._both = self.board.room.least(later)
        shadow = Shadow(ask, last)
        self.shadows.append(shadow)
        return shadow

    def room(self, ask: Ask) -> Room:
        """What the ask may use without making a head wait longer."""
        return self.board.room if self._both is None or self._early(ask) else self._both

    def trial(self, ask: Ask) -> "Trial":
        """That room, to find out what it were without some of those that hold it."""
        if self._later is None or self._both is None or self._early(ask):
            return Trial(ask, self.board.room, None, self.board.room, self._left)
        return Trial(ask, self.board.room, self._later, self._both, self._left)

    def take(self, ask: Ask, placement: Placement) -> None:
        """The ask has these nodes."""
        self.board.room.take(ask.shape, placement)
        if self._later is not None:
            if self._early(ask):
                self._left.add(ask.request.uid)
            else:
                self._later.take(ask.shape, placement)
            self._meet(placement)

    def promise(self, ask: Ask, placement: Placement, victims: list[Held]) -> None:
        """The ask has these nodes as soon as the victims have left them."""
        self.board.room.take(ask.shape, placement)
        if self._later is not None:
            for held in victims:
                if held.request.uid not in self._left:
                    self._left.add(held.request.uid)
                    self._later.take(held.shape, held.placement, -1)
                    self._meet(held.placement)
            self._later.take(ask.shape, placement)
            self._meet(placement)

    def _meet(self, nodes: Iterable[int]) -> None:
        assert self._later is not None
        assert self._both is not None
        for i in nodes:
            self._both.set(i, tuple(map(min, self.board.room.free[i], self._later.free[i])))

    def _early(self, ask: Ask) -> bool:
        """Whether it is over before any head could use its room."""
        shadows = [s for s in self.shadows if self.board.overlap(s.ask.shape, ask.shape)]
        return bool(shadows) and all(ask.seconds <= s.seconds < inf for s in shadows)


class Trial:
    """What the ask could use if others left, heads with a reservation still first."""

    def __init__(
        self, ask: Ask, now: Room, later: Room | None, both: Room, left: Collection[str]
    ) -> None:
        self._ask = ask
        self._now = now.copy(ask.shape)
        self._later = later and later.copy(ask.shape)
        self._both = self._now if later is None else both.copy(ask.shape)
        self._left = left

    def leave(self, held: Held, times: int = -1) -> None:
        """It is gone; with `times` 1 it is back."""
        self._now.take(held.shape, held.placement, times)
        if self._later is not None:
            if held.request.uid not in self._left:
                self._later.take(held.shape, held.placement, times)
            for i in held.placement:
                self._both.set(i, tuple(map(min, self._now.free[i], self._later.free[i])))

    def fits(self) -> bool:
        """Whether the ask would have room."""
        return self._both.capacity(self._ask.shape) >= self._ask.slots

    def place(self) -> Placement:
        """Where."""
        return self._both.place(self._ask.shape, self._ask.slots)


class Kept:
    """Quota that a waiting head has before those behind it in its queue, unless they are over.

    `seconds` is when the head starts at the latest, inf where that is not known.
    """

    def __init__(self, board: Board, head: Ask, seconds: float = inf) -> None:
        account = head.line.account
        self._kinds = tuple(account.limits)
        self._limit = account.cohort.limit
        self._used = list(account.cohort.used)
        self.seconds = seconds
        self.last: Held | None = None
        if account.lacks(head.need) is not None:
            self._wait(board, head)
        self._count(head)

    def allows(self, ask: Ask) -> bool:
        """Whether the ask leaves the head what it needs."""
        return ask.seconds <= self.seconds < inf or self._fits(ask)

    def take(self, ask: Ask) -> None:
        """The ask was admitted."""
        if not ask.seconds <= self.seconds < inf:
            self._count(ask)

    def _wait(self, board: Board, head: Ask) -> None:
        """Until so many jobs have left that the quota is enough."""
        self.seconds = 0.0
        for held in sorted(board.held, key=lambda held: held.release):
            if self._fits(head):
                break
            if held.line is not None and held.line.account.cohort is head.line.account.cohort:
                for kind in held.line.account.limits:
                    self._used[kind] -= held.need[kind]
                self.seconds, self.last = held.seconds, held

    def _fits(self, ask: Ask) -> bool:
        used, limit = self._used, self._limit
        return all(not ask.need[k] or used[k] + ask.need[k] <= limit[k] for k in self._kinds)

    def _count(self, ask: Ask) -> None:
        for kind in self._kinds:
            self._used[kind] += ask.need[kind]
