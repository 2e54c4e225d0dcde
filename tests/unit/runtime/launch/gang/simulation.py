"""A gang with the real leader and members. Time, the network and the ranks are simulated."""

import heapq
from functools import partial

from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang.checkpoints import CompleteCheckpoint, digest
from torchrun_runtime.launch.gang.leader import GangLeader, Predecessor
from torchrun_runtime.launch.gang.messages import (
    NEVER,
    SUCCEEDED,
    EndGang,
    GangOrder,
    OpenGate,
    RoundCode,
    StartRound,
    StopRound,
)
from unit.runtime.launch.gang.simulated import MOST_RESTARTS, Lead, Node
from unit.runtime.launch.gang.simulated_checkpoints import Round, SimulatedStorage
from unit.runtime.launch.gang.simulated_network import SimulatedNetwork

TIME = "2026-01-01T00:00:00.000000Z"
LIMIT = 10_000.0  # seconds of simulated time
LEADERLESS_SECONDS = 15.0
CLOSE_SECONDS = 0.5
LONGEST_LIFE = 40.0  # of ranks whose pod has ended


class Simulation(SimulatedNetwork):
    """A gang until the end of all its members, with faults from a random generator.

    pauses: how often a launcher is stopped and continued. is_suspended: the Job is suspended and
    resumed, and its first pods end late.
    """

    def __init__(
        self, seed: int, size: int, pauses: int = 0, *, is_suspended: bool = False
    ) -> None:
        super().__init__(seed)
        self.running: dict[str, Round] = {}
        self.rounds: list[int] = []  # of starts on node 0
        self.rounds_after_resumption = 0
        self.has_failed = False  # one of the nodes
        self.violations: list[str] = []
        self.storage = SimulatedStorage(size, self.random, self.violations)
        self._size = size
        self._pauses = pauses
        self._is_suspended = is_suspended
        self._run = 0
        self._known: tuple[
            CompleteCheckpoint, ...
        ] = ()  # to the controller, of a leader that has ended
        self._old_nodes: list[Node] = []  # of the run before
        self._started: set[tuple[int, Round]] = set()  # nodes and the rounds that they started

    @property
    def have_all_ended(self) -> bool:
        """Whether the launchers of all nodes have ended by themselves."""
        return len(self.ended) == self._size

    @property
    def ended(self) -> list[Node]:
        """The nodes of the present pods that have ended by themselves."""
        return [node for node in self._nodes if node.has_ended]

    def run(self) -> None:
        """Run the gang to its end, or to the limit of time."""
        self._create_pods(self.random.uniform(0, 5))
        for revision in range(self.random.randrange(3)):
            code = RoundCode(revision + 1)
            self._later(self.random.uniform(0, 60), partial(self._announce, code))
        for _ in range(self._pauses):
            self._later(self.random.uniform(0, 60), self._pause)
        if self._is_suspended:
            self._later(self.random.uniform(0, 90), self._suspend)
        self._tick()
        while self._queue and not self.is_over and self.now < LIMIT:
            self.now, _, step = heapq.heappop(self._queue)
            step()

    @property
    def is_over(self) -> bool:
        """Whether all nodes have ended, or the controller ends the others.

        It does that if a node has failed, or has ended after a suspension.
        """
        may_end = self._is_suspended and bool(self.ended)
        return self.have_all_ended or may_end or (self.has_failed and not self._leads)

    def _create_pods(self, gate: float) -> None:
        """Create all pods of the Job. gate: seconds until that of node 0 opens."""
        lead = Lead(self._size, self._run)
        self._leads.append(lead)
        self._nodes = [
            Node(index, self._run, None if index else lead.process) for index in range(self._size)
        ]
        for node in self._nodes:
            node.lost_at = self.now
            if node.index:
                self._later(self._delay(), partial(self._connect, node))
        self._later(gate, lambda: self._open_gate(self._nodes[0], lead))

    # Time

    def _tick(self) -> None:
        for lead in self._leads:
            if lead.process.paused_until <= self.now:
                self._call(lead, GangLeader.tick)
        for node in (*self._nodes, *self._old_nodes):
            if node.process.paused_until <= self.now and self._is_leaderless(node):
                if not self._has_heard_of_success(node):
                    self.has_failed = True  # the others wait for a node that has ended
                    self._leads.clear()
                self._end_node(node)
        self._later(0.5, self._tick)

    def _pause(self) -> None:
        processes = [*(lead.process for lead in self._leads), *(n.process for n in self._nodes)]
        process = self.random.choice(processes)
        if process.paused_until <= self.now:
            process.paused_until = self.now + self.random.choice((2, 60)) * self.random.random()

    def _announce(self, code: RoundCode) -> None:
        for lead in self._leads:
            self._call(lead, lambda leader, now: leader.announce(code, 0, now))

    # The main thread of a node

    def _wake(self, node: Node) -> None:
        """Let the main thread take the newest order, and follow it a little later."""
        if node.is_busy or not node.follows:
            return
        node.is_busy = True
        order, leader = node.order, node.leader
        stall = self.random.uniform(0, 20) if self.random.random() < 0.05 else 0.0
        step = lambda: self._follow(node, order, leader)  # noqa: E731
        self._later(self._delay() * 0.1 + stall, lambda: self._when_awake(node.process, step))

    def _follow(self, node: Node, order: GangOrder | None, leader: str | None) -> None:
        node.is_busy = False
        if not node.follows:
            return
        before = node.member.state
        if node.id in self.running:
            if node.member.stop(order) is not None:
                self._end_ranks_later(node, self._delay(), None, stopped=True)
        else:
            step = node.member.follow(order)
            if isinstance(step, StartRound):
                self._start_ranks(node, step, leader)
            elif isinstance(step, EndGang):
                self._end_node(node)
            elif isinstance(order, (OpenGate, StopRound)):
                self._check_paths(node, order.checkpoints)
        if node.member.state != before:
            self._report(node)
        if node.order != order:
            self._wake(node)

    def _check_paths(self, node: Node, candidates: tuple[CompleteCheckpoint, ...]) -> None:
        """Look for the candidates of an order in another thread."""
        name = digest(candidates)
        if not name or name in (node.member.state.checked, node.checks):
            return
        node.checks, ranks = name, node.ranks

        def end() -> None:
            if node.follows and (node.checks, node.ranks) == (name, ranks):
                node.checks = ""
                node.member.check(name, self.storage.find_missing(node.index, candidates))
                self._report(node)

        self._later(self._delay() * 3, lambda: self._when_awake(node.process, end))

    def _save(self, node: Node, own: Round) -> None:
        """Save in the rank of a node, again and again."""
        if self.running.get(node.id) == own and node.follows:
            node.member.save(self.storage.save(node.index, own, node.member.state.saved))
            self._report(node)
            pause = self.random.uniform(0, 6)
            self._later(
                pause, lambda: self._when_awake(node.process, partial(self._save, node, own))
            )

    def _start_ranks(self, node: Node, start: StartRound, leader: str | None) -> None:
        own = leader, start.round
        others = {other: each for other, each in self.running.items() if each != own}
        if others:
            self.violations.append(f"{node.id} starts {own} beside {others}")
        if (node.index, own) in self._started:
            self.violations.append(f"{node.id} joins {own} after its start")
        if start.restarts > MOST_RESTARTS:
            self.violations.append(f"{own} has {start.restarts} restarts")
        self._started.add((node.index, own))
        self.running[node.id] = own
        self.storage.start(node.index, own, start.checkpoint)
        node.ranks += 1
        node.checks = ""
        self._later(self.random.uniform(0, 10), partial(self._save, node, own))
        if node.index == 0:
            self.rounds.append(start.round)
            self.rounds_after_resumption += node.run > 0
        self._end_ranks_later(node, self.random.uniform(0, 30), self._outcome(), stopped=False)

    def _outcome(self) -> "Cause | None":
        if self.random.random() < max(0.6, 0.4 ** (1 / self._size)):
            return None
        if self.random.random() < 0.5:
            return self._lost_peer()
        return Cause(self.random.randrange(1, 4), 0, None, "Exception", "ValueError", TIME)

    def _lost_peer(self) -> Cause:
        code = self.random.randrange(1, 4)
        return Cause(code, 0, None, "Exception", "Connection closed by peer", TIME)

    def _end_ranks_later(
        self, node: Node, seconds: float, cause: "Cause | None", *, stopped: bool
    ) -> None:
        token = node.ranks
        step = lambda: self._end_ranks(node, token, cause, stopped=stopped)  # noqa: E731
        self._later(seconds, lambda: self._when_awake(node.process, step))

    def _end_ranks(self, node: Node, token: int, cause: "Cause | None", *, stopped: bool) -> None:
        if node.ranks != token or node.id not in self.running or not node.follows:
            return
        if node.is_busy:
            self._end_ranks_later(node, 0.01, cause, stopped=stopped)
            return
        if stopped and self.random.random() < 0.5:  # a handler of SIGTERM saves
            own = self.running[node.id]
            node.member.save(self.storage.save(node.index, own, node.member.state.saved))
        own = self.running.pop(node.id)
        if cause is None and not all((n, own) in self._started for n in range(self._size)):
            cause = self._lost_peer()  # the rendezvous has a time limit
        node.member.end(cause, None, stopped=stopped)
        self._report(node)
        self._wake(node)

    def _is_leaderless(self, node: Node) -> bool:
        is_lost = node.connection is None and self.now - node.lost_at > LEADERLESS_SECONDS
        has_started = node.member.state.round > NEVER
        return is_lost and has_started and node.follows and node.id not in self.running

    def _has_heard_of_success(self, node: Node) -> bool:
        """Whether the leader knows that the ranks of the present round have succeeded there."""
        states = [lead.leader._states.get(node.index) for lead in self._leads[-1:]]
        return node.member.state.state == SUCCEEDED and node.member.state in states

    def _end_node(self, node: Node) -> None:
        node.has_ended = True
        self.has_failed |= node.run == self._run and node.member.state.state != SUCCEEDED
        self._close(node)
        for lead in self._leads:
            if lead.process is node.process:
                self._end_lead(lead, self.now + CLOSE_SECONDS)

    def _end_lead(self, lead: Lead, until: float) -> None:
        """End the leader of a node that has ended, once the others have closed."""
        if self.now < until and lead.connections:
            self._later(0.1, lambda: self._end_lead(lead, until))
        else:
            self._remove_lead(lead)

    def _remove_lead(self, lead: Lead) -> None:
        if lead in self._leads:
            self._leads.remove(lead)
            self._known = lead.leader.checkpoints().newest or self._known
        for node in (*self._nodes, *self._old_nodes):
            if node.connection is not None and node.connection.lead is lead:
                self._break(node.connection)

    def _remove_pod(self, node: Node) -> None:
        if node.has_ended or node.is_gone:
            return
        node.is_gone = True
        for lead in list(self._leads):
            if lead.process is node.process:
                self._remove_lead(lead)
        self._close(node)
        life = self.random.choice((0.0, 1.0, LONGEST_LIFE)) * self.random.random()
        self._later(life, partial(self._kill_ranks, node))

    def _kill_ranks(self, node: Node) -> None:
        self.running.pop(node.id, None)

    def _open_gate(self, node: Node, lead: Lead) -> None:
        if node.run == self._run:
            node.lost_at = self.now
            predecessor = Predecessor(checkpoints=self._known)
            self.storage.inherit(self._known)
            self._when_awake(node.process, lambda: self._pass_gate(node, lead, predecessor))

    def _pass_gate(self, node: Node, lead: Lead, predecessor: Predecessor) -> None:
        if lead in self._leads:
            self._call(lead, lambda leader, now: leader.open_gate(now, predecessor))
        self._connect(node)

    # A suspension of the Job

    def _suspend(self) -> None:
        """Delete all pods, which end late, and create new ones."""
        if self.ended:
            return
        self._run += 1
        self._old_nodes, last = self._nodes, LONGEST_LIFE
        for node in self._old_nodes:
            late = self.random.choice((1.0, 60.0)) * self.random.random()
            last = max(last, late + LONGEST_LIFE)
            self._later(late, partial(self._remove_pod, node))
        for lead in self._leads:  # also those at their gates
            self._later(last - LONGEST_LIFE, partial(self._remove_lead, lead))
        self._create_pods(last + self.random.uniform(0, 5))
