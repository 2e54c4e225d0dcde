"""The table that one decision is made on: queues in line, their use, what nodes have free."""

from torchrun_controller.reconcile.admission.quota import Account, Cohort, Need, cost_of, need_of
from torchrun_controller.reconcile.admission.room import Machines, Placement, Room, Shape
from torchrun_controller.reconcile.admission.state import Admit, Queue, Request, State, Turn
from torchrun_controller.reconcile.admission.turns import Runner, start

Key = tuple[str, str]


class Ask:
    """What a request still asks for: all its pods, or those that it wishes to grow by."""

    __slots__ = ("cost", "line", "need", "pods", "request", "shape")

    def __init__(self, line: "Line", request: Request, shape: Shape) -> None:
        self.line = line
        self.request = request
        self.shape = shape
        self.pods = request.nodes - request.admitted
        self.need: Need = need_of(request, self.pods, 0 if request.admitted else 1)
        self.cost = cost_of(self.need)


class Line:
    """A queue: who waits, the first first, who holds an admission, and its running weights."""

    def __init__(self, queue: Queue, account: Account, turn: Turn) -> None:
        self.queue = queue
        self.account = account
        self.weight = turn.weight
        self.turn = Runner(turn.weight, turn.current)
        self.spare = Runner(turn.weight, turn.spare)
        self.waiting: list[Request] = []
        self.holding: list[Request] = []
        self.next = 0  # of those that wait, the first that was not decided about yet

    @property
    def closed(self) -> str:
        """Why the queue admits nothing; empty where it does."""
        if self.queue.paused:
            return self.queue.paused
        if self.weight <= 0:
            return (
                f"queue {self.queue.name} is paused: its weight is 0; set spec.weight to 1 or more"
            )
        return ""


class Board:
    """All of it, changed in place while one decision is made."""

    def __init__(self, state: State) -> None:
        resources = {name for request in state.requests for name in request.pod}
        self.machines = Machines(state.nodes, resources)
        self.bare = self.machines.empty()
        self.room: Room = self.bare.copy()
        self.lines = _lines(state.queues)
        self.admits: list[Admit] = []
        by_key = {(line.queue.namespace, line.queue.name): line for line in self.lines}
        holding: list[Request] = []
        for request in state.requests:
            line = by_key.get((request.namespace, request.queue))
            if request.admitted:
                holding.append(request)
                if request.nodes < request.admitted:
                    self.admits.append(Admit(uid=request.uid, nodes=request.nodes))
                if line is not None:
                    line.holding.append(request)
                    line.account.take(need_of(request, request.admitted))
            elif line is not None:
                line.waiting.append(request)
        for line in self.lines:
            line.waiting.sort(key=order)
            line.holding.sort(key=order)
            if not line.waiting and not line.holding:
                line.turn.current = line.spare.current = 0
        self.held = self._settle(holding)

    def ask(self, line: Line, request: Request) -> Ask:
        """What it asks for, ready to be compared."""
        return Ask(line, request, self.machines.shape(request))

    def grant(self, ask: Ask, placement: Placement) -> None:
        """The request has what it asks for."""
        self.room.take(ask.shape, placement)
        ask.line.account.take(ask.need)
        names = {self.machines.nodes[i].name: pods for i, pods in sorted(placement.items())}
        self.admits.append(Admit(uid=ask.request.uid, nodes=ask.request.nodes, placement=names))

    def _settle(self, holding: list[Request]) -> dict[str, Placement]:
        """Where everything that is admitted is, or will be as far as can be told."""
        index = self.machines.index
        held: dict[str, Placement] = {}
        for request in holding:
            placed = {index[name]: pods for name, pods in request.placed.items() if name in index}
            held[request.uid] = placed
            self.room.take(self.machines.shape(request), placed)
        for request in sorted(holding, key=_since):
            missing = request.admitted - sum(request.placed.values())
            if missing > 0:
                shape = self.machines.shape(request)
                placement = self.room.claim(shape, missing)
                self.room.take(shape, placement)
                placed = held[request.uid]
                held[request.uid] = {
                    i: placed.get(i, 0) + placement.get(i, 0) for i in placed | placement
                }
        return held


def order(request: Request) -> tuple[int, float, str, str]:
    """Who is first within a queue: priority, then age."""
    return -request.priority, request.created.timestamp(), request.name, request.uid


def _since(request: Request) -> tuple[float, str]:
    return (request.since.timestamp() if request.since else 0.0), request.uid


def _lines(queues: tuple[Queue, ...]) -> list[Line]:
    ordered = sorted(queues, key=lambda queue: (queue.namespace, queue.name))
    cohorts: dict[str, Cohort] = {}
    lines = []
    for queue, turn in zip(ordered, start(ordered), strict=True):
        cohort = cohorts.setdefault(queue.cohort, Cohort()) if queue.cohort else Cohort()
        lines.append(Line(queue, Account(queue.quota, cohort), turn))
    return lines
