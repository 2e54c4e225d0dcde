"""The time and the network of a simulated gang."""

import heapq
import itertools
from collections.abc import Callable
from random import Random

from torchrun_runtime.launch.gang.greeting import check_leader
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.messages import (
    InvalidMessageError,
    decode_order,
    decode_state,
    encode_order,
    encode_state,
)
from torchrun_runtime.launch.gang.stopping import (
    decode_agreement,
    decode_vote,
    encode_agreement,
    encode_vote,
)
from unit.runtime.launch.gang.simulated import Connection, Lead, Node, Process


class SimulatedNetwork:
    """Moves the messages between nodes and leaders, with faults from a random generator."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.break_rate = 0.5  # of connections
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._nodes: list[Node] = []  # the newest of each index
        self._leads: list[Lead] = []  # those that listen, the newest last

    def _wake(self, node: Node) -> None:
        """Let the main thread of a node take the newest order."""
        raise NotImplementedError

    # Time

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        self._at(self.now + seconds, step)

    def _at(self, time: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._count), step))

    def _when_awake(self, process: Process, step: Callable[[], None]) -> None:
        """Take a step of a process now, or in the order of the steps once it continues."""
        if process.paused_until > self.now:
            self._at(process.paused_until, lambda: self._when_awake(process, step))
        else:
            step()

    def _delay(self) -> float:
        return self.random.choice((0.001, 0.01, 0.3, 3.0)) * self.random.random()

    def _call(self, lead: Lead, function: Callable[[GangLeader, float], None]) -> None:
        function(lead.leader, self.now)
        agreement = lead.leader.agreement
        if agreement is not None and agreement != lead.sent_agreement:
            lead.sent_agreement = agreement
            for connection in lead.connections.values():
                self._send_agreement(connection)
        order = lead.leader.order
        if order is not None and order != lead.sent:
            lead.sent = order
            for connection in lead.connections.values():
                self._send_order(connection)

    # Connections

    def _connect(self, node: Node) -> None:
        """Connect with the greeting of both sides, or try it again later."""
        if node.has_ended or node.is_gone:
            return
        self._when_awake(node.process, lambda: self._greet(node))

    def _greet(self, node: Node) -> None:
        if node.has_ended or node.is_gone or node.connection is not None:
            return
        try:
            lead = self._find_lead(node)
            lead.check(node)
            check_leader(node.member.state, node.leader, lead.id)
        except InvalidMessageError:
            self._later(self.random.uniform(0.5, 3), lambda: self._connect(node))
            return
        if node.leader not in (None, lead.id):
            node.order = None
            self._wake(node)
        node.leader = lead.id
        connection = node.connection = Connection(node, lead)
        self._report(node)
        self._send_vote(node)
        if node.index and self.random.random() < self.break_rate:
            self._later(self.random.uniform(0, 20), lambda: self._break(connection))

    def _find_lead(self, node: Node) -> Lead:
        """The leader that the name of node 0 leads to: seldom not the newest one.

        The Job controller creates pods once those from before a suspension have no name any more.
        """
        own = [lead for lead in self._leads if lead.process is node.process]
        others = [lead for lead in self._leads if lead.run >= node.run]
        if self.random.random() < 0.8:
            others = others[-1:]
        leads = own if node.index == 0 else others
        if not leads:
            raise InvalidMessageError("the leader is gone")
        lead = self.random.choice(leads)
        if lead.process.paused_until > self.now:
            raise InvalidMessageError("no greeting")
        return lead

    def _break(self, connection: Connection) -> None:
        """The network loses a connection, and what is under way in both directions."""
        if not connection.is_broken:
            connection.is_broken = True
            self._later(self._delay(), lambda: self._notice_at_lead(connection))
            self._later(self.random.uniform(0, 8), lambda: self._notice_at_node(connection))

    def _notice_at_node(self, connection: Connection) -> None:
        node = connection.node
        if node.connection is connection:
            node.connection, node.lost_at = None, self.now
            self._connect(node)

    def _notice_at_lead(self, connection: Connection) -> None:
        self._when_awake(connection.lead.process, lambda: self._lose(connection))

    def _lose(self, connection: Connection) -> None:
        lead, index = connection.lead, connection.node.index
        if lead.connections.get(index) is connection:
            del lead.connections[index]
            self._call(lead, lambda leader, now: leader.lose(index, now))

    def _close(self, node: Node) -> None:
        """The process of a node ends. What it has sent arrives, unless the network is lost, too."""
        connection, node.connection = node.connection, None
        if connection is None or connection.is_broken:
            return
        if node.is_gone and self.random.random() < 0.5:
            connection.is_broken = True
            self._later(self._delay(), lambda: self._notice_at_lead(connection))
        else:
            self._deliver(connection, "state", lambda: self._lose(connection))

    def _send_order(self, connection: Connection) -> None:
        order, node = connection.lead.leader.order, connection.node
        if order is not None:
            line = encode_order(order)
            self._deliver(connection, "order", lambda: self._take_order(node, connection, line))

    def _send_agreement(self, connection: Connection) -> None:
        agreement, node = connection.lead.leader.agreement, connection.node
        if agreement is not None:
            line = encode_agreement(agreement)
            self._deliver(connection, "order", lambda: self._take_agreement(node, connection, line))

    def _send_vote(self, node: Node) -> None:
        connection = node.connection
        if connection is not None and node.vote is not None:
            line = encode_vote(node.vote)
            self._deliver(connection, "state", lambda: self._take_vote(connection, line))

    def _report(self, node: Node) -> None:
        connection = node.connection
        if connection is not None:
            line = encode_state(node.member.state)
            self._deliver(connection, "state", lambda: self._take_state(connection, line))

    def _deliver(self, connection: Connection, way: str, step: Callable[[], None]) -> None:
        """Deliver after a delay, after what was sent before, and not if the connection breaks."""
        delay = self._delay() if connection.node.index else 0.0
        at = connection.arrivals[way] = max(connection.arrivals.get(way, 0.0), self.now + delay)
        process = connection.node.process if way == "order" else connection.lead.process

        def deliver() -> None:
            if not connection.is_broken:
                self._when_awake(process, lambda: None if connection.is_broken else step())

        self._at(at, deliver)

    def _take_state(self, connection: Connection, line: bytes) -> None:
        lead, node, state = connection.lead, connection.node, decode_state(line)
        if lead not in self._leads:
            return
        before = lead.connections.get(node.index)
        if before is not connection and not self._join(connection, before):
            return
        self._call(lead, lambda leader, now: leader.receive(node.index, state, now))

    def _join(self, connection: Connection, before: Connection | None) -> bool:
        """Take the first state of a connection. Whether the launcher speaks for its node."""
        lead, node = connection.lead, connection.node
        try:
            if connection.has_joined:
                raise InvalidMessageError("another launcher took its place")
            lead.check(node)
        except InvalidMessageError:
            self._break(connection)
            return False
        connection.has_joined = True
        lead.connections[node.index] = connection
        if before is not None:
            self._break(before)
        lead.join(node)
        self._send_agreement(connection)
        self._send_order(connection)
        return True

    def _take_vote(self, connection: Connection, line: bytes) -> None:
        lead, index, vote = connection.lead, connection.node.index, decode_vote(line)
        assert vote is not None
        if lead.connections.get(index) is connection:
            self._call(lead, lambda leader, now: leader.receive_vote(index, vote, now))

    def _take_agreement(self, node: Node, connection: Connection, line: bytes) -> None:
        if node.connection is connection:
            node.agreement = decode_agreement(line)
            self._wake(node)

    def _take_order(self, node: Node, connection: Connection, line: bytes) -> None:
        if node.connection is connection:
            node.order = decode_order(line)
            self._wake(node)
