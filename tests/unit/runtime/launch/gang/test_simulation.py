"""The protocol on a network that loses, delays and repeats: never ranks of two rounds at once.

Leader and members are the real ones. Time, the network and the ranks are simulated. Connections
break at any moment and lose what is under way in both directions. Pods are lost and replaced. Ranks
of a lost pod may go on for some time; its replacement waits at its gate until they are dead.
"""

import heapq
import itertools
from collections.abc import Callable
from random import Random

import pytest

from torchrun_runtime.launch.failure import Cause
from torchrun_runtime.launch.gang.identity import KnownLaunchers, LauncherId, check_leader
from torchrun_runtime.launch.gang.leader import GangLeader, Predecessor
from torchrun_runtime.launch.gang.member import GangMember
from torchrun_runtime.launch.gang.messages import (
    EndGang,
    GangOrder,
    InvalidMessageError,
    MemberState,
    RoundCode,
    StartRound,
    StopRound,
    decode_order,
    decode_state,
    encode_order,
    encode_state,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy

TIME = "2026-01-01T00:00:00.000000Z"
LIMIT = 10_000.0  # seconds of simulated time
REPLACE_SECONDS = 300.0
LONGEST_LIFE = 40.0  # of ranks whose pod is lost


class Node:
    """One pod of a node: its launcher, its connection, and its ranks.

    number: how many pods of the node were there before.
    """

    def __init__(self, index: int, number: int = 0) -> None:
        self.index = index
        self.id = LauncherId(f"{index}.{number}", number)
        self.member = GangMember()
        self.connection = 0  # the number of the present one, 0 for none
        self.leader: LauncherId | None = None  # the last one that it was connected to
        self.order: GangOrder | None = None
        self.leader_number = self.reported_to = 0
        self.is_busy = False  # the main thread follows an order
        self.ranks = 0  # changes when ranks start or end
        self.is_leaving = self.is_gone = False

    @property
    def follows(self) -> bool:
        """Whether its launcher follows orders."""
        return not (self.is_leaving or self.is_gone)


# A round of a leader: another one may use its number again.
Round = tuple[LauncherId | None, int]


class Lead:
    """The leader in one pod of node 0."""

    def __init__(self, size: int, number: int, replace_seconds: float) -> None:
        self.id = LauncherId(f"0.{number}", number)
        policy = RestartPolicy(RestartLimits(4))
        self.leader = GangLeader(size, policy, replace_seconds=replace_seconds)
        self.launchers = KnownLaunchers()
        self.sent: GangOrder | None = None


class Simulation:
    """A gang until the end of all its members, with faults from a random generator.

    losses: how many pods are lost, and replaced.
    """

    def __init__(self, seed: int, size: int, losses: int = 0) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.running: dict[LauncherId, Round] = {}
        self.rounds: list[int] = []  # of starts on node 0
        self.ended: set[int] = set()
        self.replaced = 0
        self.rounds_after_loss = 0
        self.violations: list[str] = []
        self._size = size
        self._losses = losses
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._connections = itertools.count(1)
        self._nodes = [Node(index) for index in range(size)]
        self._lead: Lead | None = Lead(size, 0, REPLACE_SECONDS if losses else 0.0)
        self._arrivals: dict[tuple[int, str], float] = {}
        self._started: set[tuple[int, Round]] = set()  # nodes and the rounds that they started
        self._hung: set[Round] = set()  # ranks that wait for those of a lost pod

    def run(self) -> None:
        for node in self._nodes:
            self._later(self._delay(), lambda node=node: self._connect(node))
        first = self._lead
        self._later(self.random.uniform(0, 5), lambda: self._call(GangLeader.open_gate, first))
        for revision in range(self.random.randrange(3)):
            code = RoundCode(revision + 1)
            at = self.random.uniform(0, 60)
            self._later(at, lambda code=code: self._call(lambda ld, now: ld.announce(code, 0, now)))
        for _ in range(self._losses):
            index = self.random.randrange(self._size)
            self._later(self.random.uniform(0, 90), lambda index=index: self._lose_pod(index))
        self._tick()
        while self._queue and not self._is_over() and self.now < LIMIT:
            self.now, _, step = heapq.heappop(self._queue)
            step()

    def _is_over(self) -> bool:
        """Whether all nodes have ended. The controller ends a gang of which a lost node is left."""
        return len(self.ended) == self._size or bool(self._losses and self.ended)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), step))

    def _delay(self) -> float:
        return self.random.choice((0.001, 0.01, 0.3, 3.0)) * self.random.random()

    def _tick(self) -> None:
        self._call(GangLeader.tick)
        self._later(0.5, self._tick)

    def _call(
        self, function: Callable[[GangLeader, float], None], only: "Lead | None" = None
    ) -> None:
        """Call the present leader, or only this one if it still is."""
        lead = self._lead
        if lead is None or only not in (None, lead):
            return
        function(lead.leader, self.now)
        order = lead.leader.order
        if order is not None and order != lead.sent:
            lead.sent = order
            for node in self._nodes:
                self._send_order(node)

    # Connections

    def _connect(self, node: Node) -> None:
        """Connect with the greeting of both sides, or try it again later."""
        lead = self._lead
        if node.index in self.ended or node.is_gone:
            return
        try:
            if lead is None:
                raise InvalidMessageError("the leader is gone")
            if node.index:
                lead.launchers.check(
                    node.index,
                    node.id,
                    has_started=lead.leader.has_started,
                    is_stopping=isinstance(lead.leader.order, StopRound),
                )
            check_leader(node.member.state, node.leader, lead.id)
            if node.index and lead.launchers.join(node.index, node.id):
                self._call(lambda leader, now: leader.replace(node.index, now))
        except InvalidMessageError:
            self._later(self.random.uniform(0.5, 3), lambda: self._connect(node))
            return
        if node.leader not in (None, lead.id):
            node.order, node.leader_number = None, node.leader_number + 1
            self._wake(node)
        node.leader = lead.id
        number = node.connection = next(self._connections)
        self._send_order(node)
        self._report(node)
        if node.index and self.random.random() < 0.5:
            self._later(self.random.uniform(0, 20), lambda: self._break(node, number))

    def _break(self, node: Node, number: int) -> None:
        if node.connection == number:
            self._close(node)
            self._later(self.random.uniform(0, 8), lambda: self._connect(node))

    def _close(self, node: Node) -> None:
        """The connection ends. The leader notices it later, unless the node has connected again."""
        node.connection, lead = 0, self._lead

        def notice() -> None:
            if self._lead is lead and not self._nodes[node.index].connection:
                self._call(lambda leader, now: leader.lose(node.index, now))

        self._later(self._delay(), notice)

    def _send_order(self, node: Node) -> None:
        assert self._lead is not None
        order = self._lead.leader.order
        if node.connection and order is not None:
            line = encode_order(order)
            self._deliver(node, "order", lambda: self._take_order(node, line))

    def _report(self, node: Node) -> None:
        if node.connection and node.reported_to == node.leader_number:
            line = encode_state(node.member.state)
            self._deliver(node, "state", lambda: self._take_state(node, decode_state(line)))

    def _deliver(self, node: Node, way: str, step: Callable[[], None]) -> None:
        """Deliver after a delay, after what was sent before, and not if the connection breaks."""
        number = node.connection
        key = number, way
        delay = self._delay() if node.index else 0.0
        at = self._arrivals[key] = max(self._arrivals.get(key, 0.0), self.now + delay)

        def deliver() -> None:
            if node.connection == number:
                step()

        self._later(at - self.now, deliver)

    def _take_state(self, node: Node, state: MemberState) -> None:
        self._call(lambda leader, now: leader.receive(node.index, state, now))

    def _take_order(self, node: Node, line: bytes) -> None:
        node.order = decode_order(line)
        self._wake(node)

    # The main thread of a node

    def _wake(self, node: Node) -> None:
        """Let the main thread take the newest order, and follow it a little later."""
        if node.is_busy or node.index in self.ended or not node.follows:
            return
        node.is_busy = True
        order, number, leader = node.order, node.leader_number, node.leader
        stall = self.random.uniform(0, 20) if self.random.random() < 0.05 else 0.0
        delay = self._delay() * 0.1 + stall
        self._later(delay, lambda: self._follow(node, order, number, leader))

    def _follow(
        self, node: Node, order: GangOrder | None, number: int, leader: LauncherId | None
    ) -> None:
        node.is_busy = False
        if node.index in self.ended or not node.follows:
            return
        before = node.member.state, node.reported_to
        if node.id in self.running:
            if node.member.stop(order):
                token = node.ranks
                self._later(self._delay(), lambda: self._end_ranks(node, token, None, stopped=True))
        else:
            step = node.member.follow(order)
            if isinstance(step, StartRound):
                self._start_ranks(node, step.round, leader)
            elif isinstance(step, EndGang):
                self._end_node(node)
        node.reported_to = number
        if (node.member.state, number) != before:
            self._report(node)
        if (node.order, node.leader_number) != (order, number):
            self._wake(node)

    def _start_ranks(self, node: Node, number: int, leader: LauncherId | None) -> None:
        own = leader, number
        others = {other: each for other, each in self.running.items() if each != own}
        if others:
            self.violations.append(f"{node.id} starts {own} beside {others}")
        if (node.index, own) in self._started:
            self.violations.append(f"{node.id} joins {own} after its start")
        self._started.add((node.index, own))
        self.running[node.id] = own
        node.ranks += 1
        if node.index == 0:
            self.rounds.append(number)
            self.rounds_after_loss += self.replaced > 0
        token, cause = node.ranks, self._outcome()
        self._later(
            self.random.uniform(0, 30), lambda: self._end_ranks(node, token, cause, stopped=False)
        )

    def _outcome(self) -> "Cause | None":
        if self.random.random() < 0.6:
            return None
        lost = self.random.random() < 0.5
        message = "Connection closed by peer" if lost else "ValueError"
        return Cause(self.random.randrange(1, 4), 0, None, "Exception", message, TIME)

    def _end_ranks(self, node: Node, token: int, cause: "Cause | None", *, stopped: bool) -> None:
        if node.ranks != token or node.id not in self.running or not node.follows:
            return
        if not stopped and self.running[node.id] in self._hung:
            return
        if node.is_busy:
            self._later(0.01, lambda: self._end_ranks(node, token, cause, stopped=stopped))
            return
        del self.running[node.id]
        node.member.end(cause, None, stopped=stopped)
        self._report(node)
        self._wake(node)

    def _end_node(self, node: Node) -> None:
        self.ended.add(node.index)
        node.connection = 0

    # Lost pods

    def _lose_pod(self, index: int) -> None:
        """Delete a pod with notice, kill it, or cut its node off the network."""
        node = self._nodes[index]
        if node.index in self.ended or not node.follows:
            return
        if self.random.random() < 0.4:
            node.member.leave()
            node.is_leaving = True
            self._report(node)
            self._later(self.random.uniform(0, 10), lambda: self._remove_pod(node))
        else:
            self._remove_pod(node)

    def _remove_pod(self, node: Node) -> None:
        if node.index in self.ended or node.is_gone:
            return
        node.is_gone = True
        if node.index == 0:
            self._lead = None
            for other in self._nodes[1:]:
                other.connection = 0
                self._later(self.random.uniform(0, 8), lambda other=other: self._connect(other))
        self._close(node)
        if node.id in self.running and self.random.random() < 0.5:
            self._hung.add(self.running[node.id])
        life = self.random.choice((0.0, 1.0, LONGEST_LIFE)) * self.random.random()
        self._later(life, lambda: self.running.pop(node.id, None))
        new = Node(node.index, node.id.predecessors + 1)
        # The launcher of node 0 listens before its gate opens; another one connects after that.
        gate = life + self.random.uniform(0, 30)
        if node.index == 0:
            self._later(gate * self.random.random(), lambda: self._take_the_lead(new))
        self._later(gate, lambda: self._open_gate(new))

    def _take_the_lead(self, node: Node) -> None:
        self._lead = Lead(self._size, node.id.predecessors, REPLACE_SECONDS)

    def _open_gate(self, node: Node) -> None:
        self._nodes[node.index] = node
        self.replaced += 1
        if node.index == 0:
            rounds = self.random.choice((0, max(self.rounds, default=-1) + 1))
            predecessor = Predecessor(0, rounds)
            self._call(lambda leader, now: leader.open_gate(now, predecessor))
        self._connect(node)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_of_two_rounds_never_run_at_once_and_every_gang_ends(size: int) -> None:
    rounds = 0
    for seed in range(400):
        simulation = Simulation(seed, size)
        simulation.run()
        assert simulation.violations == [], f"seed {seed}"
        assert len(simulation.ended) == size, f"seed {seed}: the gang does not end"
        assert simulation.rounds == sorted(set(simulation.rounds)), f"seed {seed}"
        rounds += len(simulation.rounds)
    assert rounds > 400, "no simulation has a second round"


@pytest.mark.parametrize("losses", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_gang_goes_on_with_replaced_pods_and_never_runs_two_rounds(
    size: int, losses: int
) -> None:
    replaced = rounds = 0
    for seed in range(400):
        simulation = Simulation(seed, size, losses)
        simulation.run()
        assert simulation.violations == [], f"seed {seed}"
        assert simulation.ended, f"seed {seed}: the gang neither goes on nor ends"
        replaced += simulation.replaced
        rounds += simulation.rounds_after_loss
    assert replaced > 100
    assert rounds > 100, "no gang goes on after a loss"
