"""A gang with the real leader and members. Time, the network and the ranks are simulated."""

import heapq
from functools import partial

from torchrun_runtime.launch.failure import Cause
from torchrun_runtime.launch.gang.identity import LauncherId
from torchrun_runtime.launch.gang.leader import GangLeader, Predecessor
from torchrun_runtime.launch.gang.messages import (
    DONE,
    NEVER,
    SUCCEEDED,
    EndGang,
    GangOrder,
    RoundCode,
    StartRound,
)
from unit.runtime.launch.gang.simulated import MOST_RESTARTS, Lead, Node
from unit.runtime.launch.gang.simulated_network import SimulatedNetwork

TIME = "2026-01-01T00:00:00.000000Z"
LIMIT = 10_000.0  # seconds of simulated time
REPLACE_SECONDS = 300.0
LEADERLESS_SECONDS = 15.0
LINGER_SECONDS = 15.0
LONGEST_LIFE = 40.0  # of ranks whose pod is lost

# A round of a leader: another one may use its number again.
Round = tuple[LauncherId | None, int]


class Simulation(SimulatedNetwork):
    """A gang until the end of all its members, with faults from a random generator.

    losses: how many pods are lost, and replaced. pauses: how often a launcher is stopped and
    continued. is_suspended: the Job is suspended and resumed, and its first pods end late.
    """

    def __init__(
        self, seed: int, size: int, losses: int = 0, pauses: int = 0, *, is_suspended: bool = False
    ) -> None:
        super().__init__(seed)
        self.running: dict[LauncherId, Round] = {}
        self.rounds: list[int] = []  # of starts on node 0
        self.replaced = 0
        self.rounds_after_loss = self.rounds_after_resumption = 0
        self.has_succeeded = False  # the gang
        self.has_failed = False  # one of the nodes
        self.ends_without_leader = 0  # of nodes of a gang that has succeeded
        self.done_rounds: list[int] = []  # of pods that were deleted after their success
        self.violations: list[str] = []
        self._size = size
        self._losses = losses
        self._pauses = pauses
        self._is_suspended = is_suspended
        self._replace_seconds = REPLACE_SECONDS if losses or is_suspended else 0.0
        self._run = 0
        self._safe_at = 0.0  # no pod of an earlier run may run after that
        self._old_nodes: list[Node] = []  # of the run before
        self._started: set[tuple[int, Round]] = set()  # nodes and the rounds that they started
        self._hung: set[Round] = set()  # ranks that wait for those of a lost pod

    @property
    def have_all_ended(self) -> bool:
        """Whether the launchers of all nodes have ended by themselves."""
        return len(self.ended) == self._size

    @property
    def ended(self) -> list[Node]:
        """The nodes of the present pods that have ended by themselves."""
        return [node for node in self._nodes if node.has_ended and not node.is_leaving]

    def run(self) -> None:
        """Run the gang to its end, or to the limit of time."""
        self._create_pods(self.random.uniform(0, 5))
        for revision in range(self.random.randrange(3)):
            code = RoundCode(revision + 1)
            self._later(self.random.uniform(0, 60), partial(self._announce, code))
        for _ in range(self._losses):
            index = self.random.randrange(self._size)
            self._later(self.random.uniform(0, 90), partial(self._lose_pod, index))
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

        It does that if a node has failed, or ended beside one that is lost.
        """
        if any(node.member.state.state == DONE for node in self._nodes) and any(
            node.is_gone or (node.id.predecessors and node.member.state.round == NEVER)
            for node in self._nodes
        ):
            return True
        may_lose = bool(self._losses or self._is_suspended) and self.ended
        return bool(self.have_all_ended or may_lose or (self.has_failed and not self._leads))

    def _create_pods(self, gate: float) -> None:
        """Create all pods of the Job. gate: seconds until that of node 0 opens."""
        lead = Lead(self._size, 0, self._run, self._replace_seconds)
        self._leads.append(lead)
        self._nodes = [
            Node(index, 0, self._run, None if index else lead.process)
            for index in range(self._size)
        ]
        for node in self._nodes:
            node.lost_at = self.now
            if node.index:
                self._later(self._delay(), partial(self._connect, node))
        self._later(gate, lambda: self._open_gate(self._nodes[0], lead, Predecessor()))

    # Time

    def _tick(self) -> None:
        for lead in self._leads:
            if lead.process.paused_until <= self.now:
                self._call(lead, GangLeader.tick)
        for node in (*self._nodes, *self._old_nodes):
            if node.process.paused_until <= self.now and self._is_leaderless(node):
                has_succeeded = node.member.state.state == SUCCEEDED
                self.ends_without_leader += has_succeeded and self.has_succeeded
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
        order, number, leader = node.order, node.leader_number, node.leader
        stall = self.random.uniform(0, 20) if self.random.random() < 0.05 else 0.0
        step = lambda: self._follow(node, order, number, leader)  # noqa: E731
        self._later(self._delay() * 0.1 + stall, lambda: self._when_awake(node.process, step))

    def _follow(
        self, node: Node, order: GangOrder | None, number: int, leader: LauncherId | None
    ) -> None:
        node.is_busy = False
        if not node.follows:
            return
        before = node.member.state, node.reported_to
        if node.id in self.running:
            if (stop := node.member.stop(order)) is not None:
                if stop.lost and self._losses == 1 and stop.round in self.done_rounds:
                    self.violations.append(f"{node.id} is stopped for a pod that has succeeded")
                self._end_ranks_later(node, self._delay(), None, stopped=True)
        else:
            step = node.member.follow(order)
            if isinstance(step, StartRound):
                self._start_ranks(node, step, leader, before[0].restarts)
            elif isinstance(step, EndGang):
                self._end_node(node)
        node.reported_to = number
        if (node.member.state, number) != before:
            self._report(node)
        if (node.order, node.leader_number) != (order, number):
            self._wake(node)

    def _start_ranks(
        self, node: Node, start: StartRound, leader: LauncherId | None, restarts: int
    ) -> None:
        own = leader, start.round
        others = {other: each for other, each in self.running.items() if each != own}
        if others:
            self.violations.append(f"{node.id} starts {own} beside {others}")
        if (node.index, own) in self._started:
            self.violations.append(f"{node.id} joins {own} after its start")
        if not restarts <= start.restarts <= MOST_RESTARTS:
            self.violations.append(f"{own} has {start.restarts} restarts after {restarts}")
        self._started.add((node.index, own))
        self.running[node.id] = own
        node.ranks += 1
        if node.index == 0:
            self.rounds.append(start.round)
            self.rounds_after_loss += self.replaced > 0
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
        if not stopped and self.running[node.id] in self._hung:
            return
        if node.is_busy:
            self._end_ranks_later(node, 0.01, cause, stopped=stopped)
            return
        own = self.running.pop(node.id)
        if cause is None and not all((n, own) in self._started for n in range(self._size)):
            cause = self._lost_peer()  # the rendezvous has a time limit
        node.member.end(cause, None, stopped=stopped)
        self._report(node)
        self._wake(node)

    def _is_leaderless(self, node: Node) -> bool:
        seconds = max(LEADERLESS_SECONDS, self._replace_seconds)
        is_lost = node.connection is None and self.now - node.lost_at > seconds
        has_started = node.member.state.round > NEVER
        return is_lost and has_started and node.follows and node.id not in self.running

    def _has_heard_of_success(self, node: Node) -> bool:
        """Whether the leader knows that the ranks of the present round have succeeded there."""
        states = [lead.leader._states.get(node.index) for lead in self._leads[-1:]]
        return node.member.state.state == SUCCEEDED and node.member.state in states

    def _end_node(self, node: Node) -> None:
        node.has_ended = True
        has_succeeded = node.member.state.state in (SUCCEEDED, DONE)
        self.has_failed |= node.run == self._run and not has_succeeded
        self._close(node)
        for lead in self._leads:
            if lead.process is node.process:
                seconds = LINGER_SECONDS if lead.leader.has_succeeded else 0.5
                self._end_lead(lead, self.now + seconds)

    def _end_lead(self, lead: Lead, until: float) -> None:
        """End the leader of a node that has ended, once the others have the last order."""
        has_all = len(lead.ended_members) == self._size - 1
        if self.now < until and not has_all:
            self._later(0.1, lambda: self._end_lead(lead, until))
        else:
            self._remove_lead(lead)

    def _remove_lead(self, lead: Lead) -> None:
        if lead in self._leads:
            self._leads.remove(lead)
            self.has_succeeded |= lead.leader.has_succeeded
        for node in (*self._nodes, *self._old_nodes):
            if node.connection is not None and node.connection.lead is lead:
                self._break(node.connection)

    # Lost pods

    def _lose_pod(self, index: int) -> None:
        """Delete a pod with notice, kill it, or cut its node off the network."""
        node = self._nodes[index]
        if node.follows:
            self._delete_pod(node)

    def _delete_pod(self, node: Node, seconds: float = 10.0) -> None:
        if self.random.random() < 0.4:
            self._when_awake(node.process, lambda: self._leave(node))
            self._later(self.random.uniform(0, seconds), lambda: self._remove_pod(node))
        else:
            self._remove_pod(node)

    def _leave(self, node: Node) -> None:
        if node.follows:
            has_succeeded = node.member.state.state == SUCCEEDED
            has_heard = self._has_heard_of_success(node)
            node.member.leave()
            node.is_leaving = True
            self._report(node)
            if has_succeeded:
                self.done_rounds.append(node.member.state.round)
                if not has_heard:
                    self.has_failed = True  # the others wait for a node that has ended
                    self._leads.clear()
                self._end_node(node)  # the Job controller creates no other pod

    def _remove_pod(self, node: Node) -> None:
        if node.has_ended or node.is_gone:
            return
        node.is_gone = True
        for lead in list(self._leads):
            if lead.process is node.process:
                self._remove_lead(lead)
        self._close(node)
        if node.id in self.running and self.random.random() < 0.5:
            self._hung.add(self.running[node.id])
        life = self.random.choice((0.0, 1.0, LONGEST_LIFE)) * self.random.random()
        self._later(life, partial(self._kill_ranks, node))
        if node.run == self._run:
            self._replace_pod(node, life)

    def _kill_ranks(self, node: Node) -> None:
        self.running.pop(node.id, None)

    def _replace_pod(self, lost: Node, life: float) -> None:
        """Create the next pod. Its gate opens once the ranks of the lost one are dead."""
        new = Node(lost.index, lost.id.predecessors + 1, lost.run)
        # The controller opens no gate while a pod of an earlier run may run.
        gate = max(life, self._safe_at - self.now) + self.random.uniform(0, 30)
        if not new.index:
            # The launcher of node 0 listens before its gate opens; another one connects after that.
            lead = Lead(self._size, new.id.predecessors, new.run, self._replace_seconds)
            new.process = lead.process
            self._later(gate * self.random.random(), lambda: self._listen(new, lead))
            rounds = self.random.choice((0, max(self.rounds, default=-1) + 1))
            predecessor = Predecessor(0, rounds)
            self._later(gate, lambda: self._open_gate(new, lead, predecessor))
        else:
            self._later(gate, lambda: self._open_gate(new, None, Predecessor()))

    def _listen(self, node: Node, lead: Lead) -> None:
        if node.run == self._run:
            self._leads.append(lead)

    def _open_gate(self, node: Node, lead: Lead | None, predecessor: Predecessor) -> None:
        if node.run == self._run:
            self._nodes[node.index] = node
            self.replaced += node.id.predecessors > 0
            node.lost_at = self.now
            self._when_awake(node.process, lambda: self._pass_gate(node, lead, predecessor))

    def _pass_gate(self, node: Node, lead: Lead | None, predecessor: Predecessor) -> None:
        if lead is not None and lead in self._leads:
            self._call(lead, lambda leader, now: leader.open_gate(now, predecessor))
        self._connect(node)

    # A suspension of the Job

    def _suspend(self) -> None:
        """Delete all pods, which end late, and create new ones. The counts of pods start at 0."""
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
        self._safe_at = self.now + last
        self._create_pods(last + self.random.uniform(0, 5))
