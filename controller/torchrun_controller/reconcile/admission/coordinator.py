"""Admission over all queues at once: who may run, who has to leave, what everybody else waits for.

A decision goes through the queues in five steps:

1. Who was promised room gets it as soon as it is free.
2. Turns: the queue whose turn it is gets its head admitted. The first head that does not fit has
   others preempted for it, where it may, or gets a reservation, and the turns on its nodes end.
3. Heads for which quota is missing have others preempted, where they may, or wait.
4. Backfill: heads and those behind them go where they make no reservation wait, the queue that got
   least for its weight first.
5. Jobs that wish to grow get what is left.

What does not fit is not tried again: within a decision room and quota only become less.
"""

from datetime import datetime
from math import inf

from torchrun_controller.reconcile.admission import victims
from torchrun_controller.reconcile.admission.board import Ask, Board, Held, Line, order
from torchrun_controller.reconcile.admission.messages import Blocked, Teller
from torchrun_controller.reconcile.admission.quota import Cohort, Need, need_of
from torchrun_controller.reconcile.admission.shadow import Kept, Reservations
from torchrun_controller.reconcile.admission.state import (
    Admit,
    Decisions,
    GiveBack,
    Preempt,
    State,
    Wait,
)
from torchrun_controller.reconcile.admission.turns import charge, rank

# An empty cluster is filled in pieces of this size, so that no decision takes long.
MOST_ADMITS = 100
# How many of all queues' jobs behind the heads are tried (Slurm's bf_max_job_test is 500).
BACKFILL = 1000
LEAST_BACKFILL = 16  # of one queue


def admit(state: State, now: datetime) -> Decisions:
    """What is to be done about the state; the same for the same objects in any order."""
    coordinator = Coordinator(state, now)
    coordinator.decide()
    return coordinator.decisions()


class Coordinator:
    """One decision in the making."""

    def __init__(self, state: State, now: datetime) -> None:
        self.now = now
        self.board = Board(state)
        self.reservations = Reservations(self.board)
        self.open = [line for line in self.board.lines if not line.closed]
        self.preempts: list[Preempt] = []
        self.waits: dict[str, Wait] = {}
        self.gives_back: dict[str, int] = {}
        self.teller = Teller(self.board, now)
        self.blocked: dict[Line, Blocked] = {}  # why the head of a queue waits
        self.settled: set[str] = set()  # admitted, promised room, or never to fit
        self._granted = 0
        self._kept: dict[Line, Kept] = {}
        self._cohorts: dict[Cohort, list[Line]] = {}
        for line in self.open:
            self._cohorts.setdefault(line.account.cohort, []).append(line)
            self._advance(line)

    def decide(self) -> None:
        """All steps; what is left out when there is much to admit comes with the next call."""
        for step in (self._nominated, self._turns, self._short, self._backfill, self._growth):
            step()
            if self.full:
                return

    @property
    def full(self) -> bool:
        """Whether enough was admitted for one time."""
        return self._granted >= MOST_ADMITS

    def decisions(self) -> Decisions:
        """What came of it, in words for everybody who waits."""
        for line in self.board.lines:
            ahead = [request for request in line.waiting if request.uid not in self.settled]
            self.teller.line(self.waits, line, ahead, self.blocked.get(line))
        return Decisions(
            admits=tuple(self.board.admits),
            preempts=tuple(self.preempts),
            gives_back=tuple(
                GiveBack(uid=uid, nodes=nodes) for uid, nodes in sorted(self.gives_back.items())
            ),
            waits=self.waits,
            queues=tuple(self.teller.summary(line) for line in self.board.lines),
            requeue_after=0.0 if self.full else None,
        )

    def _nominated(self) -> None:
        """Who was promised room: it is there, or still being freed, or the promise is void."""
        for line in self.open:
            for request in [request for request in line.waiting if request.nominated]:
                ask = self.board.ask(line, request)
                fits = self.board.room.capacity(ask.shape) >= ask.slots
                if fits and line.account.lacks(ask.need) is None:
                    self._grant(ask, turn=True)
                    continue
                freed = victims.find(self.reservations, ask, fresh=False)
                if freed is not None:
                    self._promise(ask, freed)

    def _turns(self) -> None:
        """Heads in the order of turns, until the room on their nodes is reserved."""
        while not self.full:
            able = [
                line.head
                for line in self.open
                if line.head is not None
                and line not in self._kept
                and self.reservations.over(line.head) is None
                and line.account.lacks(line.head.need) is None
                and self._lender(line.head) is None
            ]
            if not able:
                return
            head = max(able, key=lambda head: rank(head.line.turn, head.cost))
            if self.board.room.capacity(head.shape) >= head.slots:
                self._grant(head, turn=True)
            elif not self._preempt(head):
                self._wait(head)

    def _short(self) -> None:
        """Heads for which their quota is not enough, or which would borrow before a lender."""
        for line in self.open:
            while (head := line.head) is not None and line not in self._kept:
                kind = line.account.lacks(head.need)
                lender = self._lender(head)
                if kind is None and lender is None:
                    break
                unused = kind is not None and self._take_unused(head)
                if kind is None or unused or not self._preempt(head):
                    self._wait(head)

    def _take_unused(self, head: Ask) -> bool:
        """Have gangs that run with fewer nodes give back what they do not use, if that will do.

        It is charged until it is given back.
        """
        account = head.line.account
        taken: list[tuple[Held, Need]] = []
        for held in self._unused(account.cohort):
            if account.lacks(head.need) is None:
                break
            assert held.line is not None
            assert held.request.uses is not None
            need = need_of(held.request, held.request.admitted - held.request.uses, 0)
            held.line.account.take(need, -1)
            taken.append((held, need))
        enough = account.lacks(head.need) is None
        for held, need in taken:
            assert held.line is not None
            held.line.account.take(need)
            if enough:
                assert held.request.uses is not None
                self.gives_back[held.request.uid] = held.request.uses
        return enough

    def _unused(self, cohort: Cohort) -> list[Held]:
        """Gangs of the cohort that do not use all that they were admitted for."""
        return [
            held
            for line in self._cohorts[cohort]
            for held in line.held
            if held.request.uses is not None and not held.leaving
        ]

    def _backfill(self) -> None:
        """Whoever fits without making a head wait, as long as there are any."""
        depth = max(LEAST_BACKFILL, BACKFILL // max(1, len(self.open)))
        ends = {line: line.next + depth for line in self.open}
        found = {line: self._next(line, ends[line]) for line in self.open}
        while not self.full:
            asks = [ask for ask in found.values() if ask is not None]
            if not asks:
                return
            ask = max(asks, key=lambda ask: rank(ask.line.spare, ask.cost))
            if self._passes(ask):
                self._grant(ask)
            found[ask.line] = self._next(ask.line, ends[ask.line])

    def _next(self, line: Line, end: int) -> Ask | None:
        """The next of the queue that may go now; a head that may not is what others go behind."""
        while line.head is not None and line.next < min(end, len(line.waiting)):
            if line not in self._kept:
                head = line.head
                if self._passes(head):
                    return head
                if not self._preempt(head):
                    self._wait(head)
                continue
            request = line.waiting[line.next]
            # Most fail by this, which is cheap.
            room = self.board.room.capacity(self.board.machines.shape(request))
            if room >= request.slots(request.nodes):
                ask = self._first(line)
                if ask is not None and self._passes(ask):
                    return ask
            line.next += 1
        return None

    def _growth(self) -> None:
        """Admitted jobs that ask for more."""
        growing = [
            held.request
            for line in self.open
            for held in line.held
            if held.request.nodes > held.request.admitted and not held.leaving
        ]
        lines = {held.request.uid: line for line in self.open for held in line.held}
        for request in sorted(growing, key=order):
            ask = self.board.ask(lines[request.uid], request)
            if self._impossible(ask):
                continue
            if self._passes(ask):
                self._grant(ask)
            else:
                self.waits[request.uid] = self.teller.growth(ask)

    def _first(self, line: Line) -> Ask | None:
        """The first of the queue that is not settled, from where it was looked at last."""
        while line.next < len(line.waiting):
            request = line.waiting[line.next]
            if request.uid not in self.settled:
                ask = self.board.ask(line, request)
                if not self._impossible(ask):
                    return ask
            line.next += 1
        return None

    def _advance(self, line: Line) -> None:
        line.head = self._first(line)

    def _impossible(self, ask: Ask) -> bool:
        """Whether it would not fit if nothing else ran; then it says so and keeps nobody up."""
        wait = None
        nodes = ask.request.nodes
        kind = ask.line.account.exceeds(need_of(ask.request, nodes))
        if kind is not None:
            wait = self.teller.exceeds_quota(ask, kind)
        elif self.board.bare.capacity(ask.shape) < ask.request.slots(nodes):
            wait = self.teller.exceeds_nodes(ask)
        if wait is None:
            return False
        self.waits[ask.request.uid] = wait
        self.settled.add(ask.request.uid)
        return True

    def _passes(self, ask: Ask) -> bool:
        """Whether it fits, by quota and by nodes, and makes no head wait longer."""
        kept = self._kept.get(ask.line)
        return (
            self.reservations.room(ask).capacity(ask.shape) >= ask.slots
            and ask.line.account.lacks(ask.need) is None
            and (kept is None or kept.allows(ask))
            and self._lender(ask) is None
        )

    def _lender(self, ask: Ask) -> Line | None:
        """A queue without a reservation that waits for its own, of which the ask would borrow."""
        lines = self._cohorts[ask.line.account.cohort]
        if len(lines) == 1 or not ask.line.account.borrows(ask.need):
            return None
        for line in lines:
            head = line.head
            if head is None or line is ask.line or line.account.borrows(head.need):
                continue
            if self.board.overlap(head.shape, ask.shape) and not self.reservations.of(head):
                return line
        return None

    def _wait(self, head: Ask) -> None:
        """The head waits for what it lacks; where nobody has a reservation yet it gets one."""
        kind = head.line.account.lacks(head.need)
        lender = self._lender(head)
        over = self.reservations.over(head)
        if kind is not None:
            self._block(head, Blocked("QuotaUsed", head, kind=kind))
        elif lender is not None:
            self._block(head, Blocked("LenderFirst", head, lender=lender))
        elif over is not None:
            fits = self.board.room.capacity(head.shape) >= head.slots
            self._block(
                head, Blocked("WaitingForTurn" if fits else "WaitingForNodes", head, over=over)
            )
        else:
            shadow = self.reservations.reserve(head)
            self._block(head, Blocked("WaitingForNodes", head, shadow=shadow), shadow.seconds)

    def _block(self, head: Ask, blocked: Blocked, seconds: float = inf) -> None:
        """The head waits; from now on those behind it may only go where that is no loss to it."""
        kept = Kept(self.board, head, seconds)
        blocked.kept = kept
        self._kept[head.line] = kept
        self.blocked[head.line] = blocked
        head.line.next += 1

    def _preempt(self, head: Ask) -> bool:
        freed = victims.find(self.reservations, head)
        if freed is None:
            return False
        self._promise(head, freed)
        return True

    def _promise(self, ask: Ask, freed: victims.Freed) -> None:
        """The ask has the room of those that have to leave, and waits for their pods to end."""
        for held in freed.victims:
            held.leave(ask.request.uid)
            self.board.leaving.append(held)
            self.preempts.append(self.teller.preempt(held, ask))
        self.reservations.promise(ask, freed.placement, self.board.leaving)
        self._settle(ask, freed.placement)
        self.waits[ask.request.uid] = self.teller.promised(ask, self.board.leaving)

    def _grant(self, ask: Ask, *, turn: bool = False) -> None:
        placement = self.reservations.room(ask).place(ask.shape, ask.slots)
        self._charge(ask, turn)
        self.reservations.take(ask, placement)
        self._granted += 1
        names = {self.board.machines.nodes[i].name: pods for i, pods in sorted(placement.items())}
        self.board.admits.append(
            Admit(uid=ask.request.uid, nodes=ask.request.nodes, placement=names)
        )
        ask.line.admitted += 1 - bool(ask.request.admitted)
        self._settle(ask, placement)

    def _settle(self, ask: Ask, placement: dict[int, int]) -> None:
        line = ask.line
        line.account.take(ask.need)
        self.board.held.append(
            Held(line, ask.request, ask.shape, placement, ask.need, self.now.timestamp())
        )
        self.settled.add(ask.request.uid)
        kept = self._kept.get(line)
        if kept is None:
            self._advance(line)
        else:
            kept.take(ask)

    def _charge(self, ask: Ask, turn: bool) -> None:
        """All queues that could have used it as well advance; those that lack quota stand still."""
        rivals = [
            line
            for line in self.open
            if line is ask.line
            or (
                line.head is not None
                and self.board.overlap(line.head.shape, ask.shape)
                and line.account.lacks(line.head.need) is None
            )
        ]
        charge(ask.line.spare, ask.cost, [line.spare for line in rivals])
        if turn:
            charge(ask.line.turn, ask.cost, [line.turn for line in rivals])
