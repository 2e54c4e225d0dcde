"""The table that one decision is made on: queues in line, their use, what nodes have free."""

from math import inf

from torchrun_controller.reconcile.admission.quota import Account, Cohort, Need, cost_of, need_of
from torchrun_controller.reconcile.admission.room import Machines, Placement, Shape
from torchrun_controller.reconcile.admission.state import Admit, Queue, Request, State, Turn
from torchrun_controller.reconcile.admission.turns import Runner, start


class Ask:
    """What a request still asks for: all its pods, or those that it wishes to grow by."""

    __slots__ = ("cost", "line", "need", "pods", "request", "seconds", "shape", "slots")

    def __init__(self, line: "Line", request: Request, shape: Shape) -> None:
        self.line = line
        self.request = request
        self.shape = shape
        self.pods = request.nodes - request.admitted
        self.slots = self.pods if request.admitted else request.slots(self.pods)
        self.need = need_of(request, self.pods, 0 if request.admitted else 1)
        self.cost = cost_of(self.need)
        self.seconds = inf if request.seconds_left is None else max(0.0, request.seconds_left)


class Held:
    """What an admitted request occupies, and in how many seconds that ends at the latest."""

    __slots__ = ("leaving", "line", "need", "placement", "request", "seconds", "shape", "since")

    def __init__(
        self,
        line: "Line | None",
        request: Request,
        shape: Shape,
        placement: Placement,
        need: Need,
        since: float,
    ) -> None:
        self.line = line
        self.request = request
        self.shape = shape
        self.placement = placement
        self.need = need
        self.since = since
        self.seconds = inf if request.seconds_left is None else max(0.0, request.seconds_left)
        self.leaving = ""
        if request.preempted_for:
            self.leave(request.preempted_for)

    def leave(self, for_uid: str) -> None:
        """It is being preempted, and over as soon as its pods have stopped."""
        self.leaving = for_uid
        self.seconds = 0.0

    @property
    def release(self) -> tuple[float, float, str]:
        """The order in which room is expected back: known ends, then the oldest."""
        return self.seconds, self.since, self.request.uid


class Line:
    """A queue: who waits, the first first, who holds an admission, and its running weights."""

    def __init__(self, queue: Queue, account: Account, turn: Turn) -> None:
        self.queue = queue
        self.account = account
        self.weight = turn.weight
        self.turn = Runner(turn.weight, turn.current)
        self.spare = Runner(turn.weight, turn.spare)
        self.waiting: list[Request] = []
        self.held: list[Held] = []
        self.admitted = 0  # by this decision
        self.next = 0  # the first of those that wait that has not been looked at
        self.head: Ask | None = None

    @property
    def closed(self) -> str:
        """Why the queue admits nothing; empty where it does."""
        if self.queue.paused:
            return self.queue.paused
        if self.weight <= 0:
            return f"queue {self.queue.name} is paused: its weight is 0, set it to 1 or more"
        return ""


class Board:
    """All of it, changed in place while one decision is made."""

    def __init__(self, state: State) -> None:
        resources = {name for request in state.requests for name in request.pod}
        self.machines = Machines(state.nodes, resources)
        self.bare = self.machines.empty()
        self.room = self.machines.empty()
        self.lines = _lines(state)
        self.held: list[Held] = []
        self.leaving: list[Held] = []
        self.admits: list[Admit] = []
        by_key = {(line.queue.namespace, line.queue.name): line for line in self.lines}
        for request in state.requests:
            line = by_key.get((request.namespace, request.queue))
            if request.admitted:
                self._hold(line, request)
            elif line is not None:
                line.waiting.append(request)
        self._settle()
        for line in self.lines:
            line.waiting.sort(key=order)
            if not line.waiting:
                line.turn.current = line.spare.current = 0

    def ask(self, line: Line, request: Request) -> Ask:
        """What it asks for, ready to be compared."""
        return Ask(line, request, self.machines.shape(request))

    def overlap(self, one: Shape, other: Shape) -> bool:
        """Whether both could use the same nodes."""
        return self.machines.overlap(one.pool, other.pool)

    def _hold(self, line: Line | None, request: Request) -> None:
        index = self.machines.index
        placed = {index[name]: pods for name, pods in request.placed.items() if name in index}
        since = request.since.timestamp() if request.since else 0.0
        need = need_of(request, request.admitted)
        held = Held(line, request, self.machines.shape(request), placed, need, since)
        self.held.append(held)
        self.room.take(held.shape, placed)
        if line is not None:
            line.held.append(held)
            line.account.take(held.need)
        if request.nodes < request.admitted:
            self.admits.append(Admit(uid=request.uid, nodes=request.nodes))

    def _settle(self) -> None:
        """Pods that have no node yet are taken to get one, the longest admitted jobs' first."""
        self.held.sort(key=lambda held: (held.since, held.request.uid))
        for held in self.held:
            request = held.request
            # What a gang does not use has no claim to a place: the scheduler is asked for one.
            pods = request.admitted if request.uses is None else request.uses
            missing = request.slots(pods) - sum(request.placed.values())
            if missing > 0:
                more = self.room.claim(held.shape, missing)
                self.room.take(held.shape, more)
                for i, pods in more.items():
                    held.placement[i] = held.placement.get(i, 0) + pods
        self.leaving = [held for held in self.held if held.leaving]
        self.admits.sort(key=lambda admit: admit.uid)


def order(request: Request) -> tuple[int, float, str, str]:
    """Who is first within a queue: priority, then age."""
    return -request.priority, request.created.timestamp(), request.name, request.uid


def _lines(state: State) -> list[Line]:
    ordered = sorted(state.queues, key=lambda queue: (queue.namespace, queue.name))
    cohorts: dict[tuple[str, str], Cohort] = {}
    lines = []
    for queue, turn in zip(ordered, start(ordered), strict=True):
        shared = queue.namespace in state.cohort_namespaces
        key = "" if shared else queue.namespace, queue.cohort
        cohort = cohorts.setdefault(key, Cohort()) if queue.cohort else Cohort()
        lines.append(Line(queue, Account(queue.quota, cohort), turn))
    return lines
