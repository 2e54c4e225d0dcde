"""The protocol on a network that loses, delays and repeats: never ranks of two rounds at once.

Leader and members are the real ones. Time, the network and the ranks are simulated. Connections
break at any moment and lose what is under way in both directions.
"""

import heapq
import itertools
from collections.abc import Callable
from random import Random

import pytest

from torchrun_runtime.launch.failure import Cause
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.member import GangMember
from torchrun_runtime.launch.gang.messages import (
    EndGang,
    GangOrder,
    MemberState,
    RoundCode,
    StartRound,
    decode_order,
    decode_state,
    encode_order,
    encode_state,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy

TIME = "2026-01-01T00:00:00.000000Z"
LIMIT = 10_000.0  # seconds of simulated time


class Simulation:
    """A gang until the end of all its members, with faults from a random generator."""

    def __init__(self, seed: int, size: int, leaves: bool = False) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.running: dict[int, int] = {}  # node to the round of its ranks
        self.rounds: list[int] = []  # of starts on node 0
        self.ended: set[int] = set()
        self.violations: list[str] = []
        self._size = size
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._leader = GangLeader(size, RestartPolicy(RestartLimits(4)))
        self._members = [GangMember() for _ in range(size)]
        self._orders: list[GangOrder | None] = [None] * size
        self._sent: GangOrder | None = None
        self._connections = [0] * size  # the number of the present connection, 0 for none
        self._numbers = itertools.count(1)
        self._ranks = [0] * size  # changes when ranks start or end
        self._may_leave = leaves
        self._arrivals: dict[tuple[int, int, str], float] = {}

    def run(self) -> None:
        for node in range(self._size):
            self._later(self._delay(), lambda node=node: self._connect(node))
        self._later(self.random.uniform(0, 5), lambda: self._call(GangLeader.open_gate))
        for revision in range(self.random.randrange(3)):
            code = RoundCode(revision + 1)
            at = self.random.uniform(0, 60)
            self._later(at, lambda code=code: self._call(lambda ld, now: ld.announce(code, 0, now)))
        if self._may_leave:
            node = self.random.randrange(self._size)
            self._later(self.random.uniform(0, 60), lambda: self._leave(node))
        self._tick()
        while self._queue and len(self.ended) < self._size and self.now < LIMIT:
            self.now, _, step = heapq.heappop(self._queue)
            step()

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), step))

    def _delay(self) -> float:
        return self.random.choice((0.001, 0.01, 0.3, 3.0)) * self.random.random()

    def _tick(self) -> None:
        self._call(GangLeader.tick)
        self._later(0.5, self._tick)

    def _call(self, function: Callable[[GangLeader, float], None]) -> None:
        function(self._leader, self.now)
        order = self._leader.order
        if order is not None and order != self._sent:
            self._sent = order
            for node in range(self._size):
                self._send_order(node)

    def _connect(self, node: int) -> None:
        if node in self.ended:
            return
        number = next(self._numbers)
        self._connections[node] = number
        self._send_order(node)
        self._report(node)
        if node and self.random.random() < 0.5:
            self._later(self.random.uniform(0, 20), lambda: self._break(node, number))

    def _break(self, node: int, number: int) -> None:
        if self._connections[node] == number:
            self._connections[node] = 0
            self._later(self._delay(), lambda: self._notice_loss(node))
            self._later(self.random.uniform(0, 8), lambda: self._connect(node))

    def _notice_loss(self, node: int) -> None:
        if not self._connections[node]:
            self._call(lambda leader, now: leader.lose(node, now))

    def _send_order(self, node: int) -> None:
        number, order = self._connections[node], self._leader.order
        if number and order is not None:
            line = encode_order(order)
            self._in_order(node, number, "order", lambda: self._take_order(node, line))

    def _report(self, node: int) -> None:
        number = self._connections[node]
        if number:
            line = encode_state(self._members[node].state)
            self._in_order(
                node, number, "state", lambda: self._take_state(node, decode_state(line))
            )

    def _in_order(self, node: int, number: int, way: str, step: Callable[[], None]) -> None:
        """Deliver after a delay, after what was sent before, and not if the connection breaks."""
        key = (node, number, way)
        at = max(self._arrivals.get(key, 0.0), self.now + (self._delay() if node else 0.0))
        self._arrivals[key] = at

        def deliver() -> None:
            if self._connections[node] == number:
                step()

        self._later(at - self.now, deliver)

    def _take_state(self, node: int, state: MemberState) -> None:
        self._call(lambda leader, now: leader.receive(node, state, now))

    def _take_order(self, node: int, line: bytes) -> None:
        self._orders[node] = decode_order(line)
        self._later(self._delay() * 0.1, lambda: self._act(node))

    def _act(self, node: int) -> None:
        """A step of the main thread of this node."""
        if node in self.ended:
            return
        member, order = self._members[node], self._orders[node]
        before = member.state
        if node in self.running:
            if member.stop(order):
                token = self._ranks[node]
                self._later(self._delay(), lambda: self._end_ranks(node, token, None, stopped=True))
            return
        step = member.follow(order)
        if isinstance(step, StartRound):
            self._start_ranks(node, step.round)
        elif isinstance(step, EndGang):
            self._end_node(node)
        if member.state != before:
            self._report(node)

    def _start_ranks(self, node: int, number: int) -> None:
        others = {other: r for other, r in self.running.items() if r != number}
        if others:
            self.violations.append(f"node {node} starts round {number} beside {others}")
        self.running[node] = number
        self._ranks[node] += 1
        if node == 0:
            self.rounds.append(number)
        token, cause = self._ranks[node], self._outcome()
        self._later(
            self.random.uniform(0, 30), lambda: self._end_ranks(node, token, cause, stopped=False)
        )

    def _outcome(self) -> "Cause | None":
        if self.random.random() < 0.6:
            return None
        lost = self.random.random() < 0.5
        message = "Connection closed by peer" if lost else "ValueError"
        return Cause(self.random.randrange(1, 4), 0, None, "Exception", message, TIME)

    def _end_ranks(self, node: int, token: int, cause: "Cause | None", *, stopped: bool) -> None:
        if self._ranks[node] != token or node not in self.running:
            return
        del self.running[node]
        self._members[node].end(cause, None, stopped=stopped)
        self._report(node)
        self._act(node)

    def _leave(self, node: int) -> None:
        if node in self.ended:
            return
        self._members[node].leave()
        self._report(node)
        self.running.pop(node, None)
        self._later(1, lambda: self._end_node(node))

    def _end_node(self, node: int) -> None:
        self.ended.add(node)
        self._connections[node] = 0


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
