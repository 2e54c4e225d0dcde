"""A planned stop or save in a gang with the real leader, ballots and calls of ranks.

Time, the network, the loops of the ranks and the memory that they share with their launchers are
simulated.
"""

import heapq
from functools import partial

from torchrun_runtime.launch.gang.ballot import Ballot, Slot, read_slot
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.messages import GangOrder, StartRound
from torchrun_runtime.launch.gang.stopping import REFUSED, STOP
from torchrun_runtime.launch.rank import _torchrun_stopping as calls
from unit.runtime.launch.gang.simulated import Lead, Node
from unit.runtime.launch.gang.simulated_network import SimulatedNetwork

LONGEST_STORE = 0.0005  # until another process sees it
POLL = 0.02  # of a rank that waits: longer than the real one, for shorter histories
ACTIVE_LOOK = 0.005  # of a launcher while it judges a proposal
# A rank that waits in vain must have a cause of more seconds: the leader decides within 5 s, and the
# news take some more.
MOST_TROUBLE = 8.0


class SharedWords:
    """The slot of a rank. What the rank stores arrives a little later, in order."""

    def __init__(self, simulation: "StopSimulation") -> None:
        self._simulation = simulation
        self._stores: list[tuple[float, int, int]] = []
        self._words = [0] * (calls.SLOT_BYTES // 8)

    def __setitem__(self, index: int, value: int) -> None:
        random = self._simulation.random
        late = random.uniform(0, LONGEST_STORE)
        if index == calls.CALL and value & 3 == calls.LEFT and random.random() < 0.05:
            late = random.uniform(0, 0.02)  # the rank does not run after its look at the word
        at = max(self._simulation.now + late, self._stores[-1][0] if self._stores else 0.0)
        self._stores.append((at, index, value))

    @property
    def runs_again_at(self) -> float:
        """When the last store has arrived: a rank that does not run stores nothing else."""
        return self._stores[-1][0] if self._stores else 0.0

    def read_words(self) -> list[int]:
        """What another process reads now."""
        while self._stores and self._stores[0][0] <= self._simulation.now:
            _, index, value = self._stores.pop(0)
            self._words[index] = value
        return self._words


class SimulatedRank:
    """The loop of one rank. token: changes with each call."""

    def __init__(self, node: Node, simulation: "StopSimulation") -> None:
        self.node = node
        self.slot = SharedWords(simulation)
        self.control = simulation.controls[node.index]
        self.calls = calls.Calls(self.slot, self.control)  # type: ignore[arg-type]
        self.left = 0  # calls
        self.ready_for = 0  # the step that it has begun
        self.is_dead = False
        self.entered_at = 0.0
        self.told: int | None = None  # the call with the answer STOP
        self.saved: list[int] = []
        self.has_waited_out: list[int] = []
        self.waited_until = 0.0
        self.compute_until = 0.0


class NodeMemory:
    """What a launcher sees of its ranks."""

    def __init__(self, ranks: list[SimulatedRank], control: list[int]) -> None:
        self._ranks = ranks
        self._control = control

    def read(self) -> list[Slot] | str:
        if any(rank.is_dead for rank in self._ranks):
            return "a rank has ended"
        slots = [read_slot(rank.slot.read_words()) for rank in self._ranks]
        return slots if all(slot.call for slot in slots) else "a rank makes no calls"

    def write(self, word: int, deadline: float) -> None:
        self._control[calls.DEADLINE] = int(deadline * 1e9)
        self._control[calls.WORD] = word


class StopSimulation(SimulatedNetwork):
    """One round of a gang, from its start until its ranks have stopped or gone on for long.

    step: seconds. grace: of a stop. is_coupled: a step of a rank ends when all have begun it.
    faults: connections break, launchers and ranks are frozen, messages are late and repeated.
    """

    def __init__(
        self,
        seed: int,
        size: int,
        ranks: int,
        step: float,
        *,
        grace: float,
        kind: str = STOP,
        is_coupled: bool = True,
        faults: bool = True,
    ) -> None:
        super().__init__(seed)
        self.violations: list[str] = []
        self.committed_at: float | None = None
        self.wanted_at = 0.0
        self.kind, self._grace, self._step = kind, grace, step
        self._size, self._faults, self._is_coupled = size, faults, is_coupled
        self.break_rate = self.random.choice((0.0, 0.5, 1.0)) if faults else 0.0
        self._slowest = self.random.choice((0.002, 0.02, 0.3, 2.0)) if faults else 0.002
        lead = Lead(size, 0)
        self._leads.append(lead)
        self._nodes = [Node(i, 0, None if i else lead.process) for i in range(size)]
        self.controls = [[0, 0] for _ in range(size)]
        self.ranks = [SimulatedRank(node, self) for node in self._nodes for _ in range(ranks)]
        self.ballots = [
            Ballot(0, NodeMemory(self._ranks_of(node), self.controls[node.index]))
            for node in self._nodes
        ]
        self._pause = max(0.1, step / 50)
        self._held: set[int] = set()
        self.forwarded: set[int] = set()
        self._started: set[int] = set()
        self._due: dict[int, float] = {}
        # When which nodes had no connection, or a frozen launcher.
        self._trouble: list[tuple[int, float, float]] = []
        self._had_begun = False

    @property
    def began(self) -> bool:
        """Whether every rank had made a call when the gang was asked."""
        return self._had_begun

    def run(self) -> None:
        lead = self._leads[0]
        for node in self._nodes:
            self._connect(node)
        self._call(lead, lambda leader, now: leader.open_gate(now))
        self._tick()
        seconds = 3.0 + self._step * self.random.uniform(0.5, 4)
        asked = [self.random.choice(self._nodes)]
        if self.kind == STOP and self.random.random() < 0.5:
            asked = self._nodes
        self._begin_at = 2.0
        for node in asked:
            late = self.random.choice((0.0, 0.01, 1.0)) * self.random.random()
            self._later(seconds + late, partial(self._ask, node))
        if self._faults:
            for _ in range(self.random.randrange(4)):
                late = self.random.choice((0.02, 5.0)) * self.random.random()
                self._later(seconds + late, self._freeze)
            for _ in range(self.random.randrange(3)):
                rank = self.random.choice(self.ranks)
                self._later(seconds + self.random.uniform(-1, 5), partial(self._stall, rank))
        self._end = seconds + 60.0 + 12 * self._step
        self._stalled: dict[SimulatedRank, float] = {}
        while self._queue and self.now < self._end and not self._is_settled():
            self.now, _, step = heapq.heappop(self._queue)
            step()
        self._check()

    def _ranks_of(self, node: Node) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if rank.node is node]

    def _is_settled(self) -> bool:
        """Whether all ranks have stopped, or have gone on for long after the end of the question."""
        if all(rank.told is not None or rank.is_dead for rank in self.ranks):
            return True
        return bool(self._settled_at) and self.now > self._settled_at

    _settled_at = 0.0

    def _settle(self) -> None:
        """The question has ended without a stop: watch the ranks for a moment."""
        if not self._settled_at:
            self._settled_at = self.now + calls.WAIT_SECONDS + 5.0 + 2 * self._step

    # Faults

    def _delay(self) -> float:
        return self._slowest * self.random.choice((0.01, 1.0)) * self.random.random()

    def _deliver(self, connection, way, step) -> None:  # type: ignore[no-untyped-def]
        super()._deliver(connection, way, step)
        if self._faults and self.random.random() < 0.1:
            super()._deliver(connection, way, step)

    def _freeze(self) -> None:
        node = self.random.choice(self._nodes)
        process = node.process
        seconds = self.random.choice((0.5, 30.0)) * self.random.random()
        process.paused_until = max(process.paused_until, self.now + seconds)
        self._trouble.append((node.index, self.now, process.paused_until))

    def _stall(self, rank: SimulatedRank) -> None:
        self._stalled[rank] = self.now + self.random.choice((0.1, 10.0)) * self.random.random()

    def _break(self, connection) -> None:  # type: ignore[no-untyped-def]
        if not connection.is_broken:
            connection.broken_at = self.now
        super()._break(connection)

    def _notice_at_node(self, connection) -> None:  # type: ignore[no-untyped-def]
        super()._notice_at_node(connection)
        until = self.now + 2 * self._slowest
        self._trouble.append((connection.node.index, connection.broken_at, until))

    def _tick(self) -> None:
        for lead in self._leads:
            self._when_awake(lead.process, lambda lead=lead: self._call(lead, GangLeader.tick))  # type: ignore[misc]
        self._later(0.5, self._tick)

    # A launcher

    def _wake(self, node: Node) -> None:
        if not self.now <= self._due.get(node.index, -1.0) <= self.now + 0.002:
            self._look_later(node, self.random.uniform(0, 0.002))

    def _look_later(self, node: Node, seconds: float) -> None:
        due = self._due[node.index] = self.now + seconds

        def step() -> None:
            if self._due[node.index] == due:
                self._when_awake(node.process, lambda: self._look(node))

        self._later(seconds, step)

    def _look(self, node: Node) -> None:
        """What the main thread of the launcher does in each pass."""
        order: GangOrder | None = node.order
        if isinstance(order, StartRound) and node.index not in self._started:
            self._started.add(node.index)
            node.member.follow(order)
            self._report(node)
            self._later(self._begin_at, partial(self._begin, node))
        ballot = self.ballots[node.index]
        ballot.follow(node.agreement, self.now)
        if node.vote != ballot.vote:
            node.vote = ballot.vote
            self._send_vote(node)
        known = ballot.known
        if self.committed_at is None and known is not None and known.state == "committed":
            self.committed_at = self.now
            if self.kind != STOP:
                self._settle()
        if known is not None and known.state == REFUSED:
            self._settle()
        if node.index in self._held and ballot.deadline is None and ballot.forwards(self.now):
            self._held.discard(node.index)
            self.forwarded.add(node.index)
            ballot.withdraw()
            node.member.leave()
            self._report(node)
            self._settle()
            for rank in self._ranks_of(node):
                self._later(self.random.uniform(0, 1), partial(self._kill, rank))
        self._look_later(node, ACTIVE_LOOK if ballot.is_active else self._pause)

    def _ask(self, node: Node) -> None:
        """Kubernetes asks a pod to end, or a user asks for a save."""
        self._when_awake(node.process, lambda: self._want(node))

    def _want(self, node: Node) -> None:
        ballot = self.ballots[node.index]
        if not self.wanted_at:
            self.wanted_at, self._had_begun = self.now, all(r.calls._count for r in self.ranks)
        if self.kind == STOP:
            self._held.add(node.index)
            ballot.want_stop(self._grace, self.now)
        else:
            ballot.want_save()
        self._look(node)

    # A rank

    def _begin(self, node: Node) -> None:
        for rank in self._ranks_of(node):
            self._later(self.random.uniform(0, 0.1), partial(self._begin_step, rank))

    def _kill(self, rank: SimulatedRank) -> None:
        rank.is_dead = True

    def _when_running(self, rank: SimulatedRank, step) -> None:  # type: ignore[no-untyped-def]
        if rank.is_dead:
            return
        until = self._stalled.get(rank, 0.0)
        if until > self.now:
            self._at(until, lambda: self._when_running(rank, step))
        else:
            step()

    def _begin_step(self, rank: SimulatedRank) -> None:
        rank.ready_for = rank.left + 1
        seconds = self._step * self.random.uniform(0.8, 1.2)
        rank.entered_at = 0.0
        if not self._is_coupled:
            self._later(seconds, lambda: self._when_running(rank, lambda: self._enter(rank)))
            return
        rank.compute_until = self.now + seconds
        if any(other.ready_for < rank.ready_for for other in self.ranks):
            return
        for other in self.ranks:
            if other.ready_for == rank.ready_for:
                late = max(other.compute_until - self.now, 0.0)
                self._later(late, partial(self._when_running, other, partial(self._enter, other)))

    def _enter(self, rank: SimulatedRank) -> None:
        rank.entered_at = self.now
        rank.calls.enter(int(self.now * 1e9))
        preempted = 0.0 if self.random.random() < 0.95 else self.random.choice((0.0005, 0.01, 0.1))
        self._later(
            preempted * self.random.random() + 2e-6,
            lambda: self._when_running(rank, lambda: self._look_at_word(rank)),
        )

    def _look_at_word(self, rank: SimulatedRank) -> None:
        answer = rank.calls.look()
        call = rank.calls._count
        if answer == calls.WAIT:
            if self.now - rank.entered_at >= calls.WAIT_SECONDS:
                rank.calls.leave()
                rank.has_waited_out.append(call)
                rank.waited_until = self.now
                answer = calls.GO_ON
            else:
                again = lambda: self._when_running(rank, lambda: self._look_at_word(rank))  # noqa: E731
                self._later(POLL, again)
                return
        if self.now - rank.entered_at > calls.WAIT_SECONDS + 15.0:
            self.violations.append("a rank waits beyond its bound")
        if answer == calls.STOP:
            rank.told = call
            return
        if answer == calls.SAVE:
            rank.saved.append(call)
        rank.left = call
        late = rank.slot.runs_again_at - self.now
        if late > LONGEST_STORE:
            self._later(late, lambda: self._begin_step(rank))
        else:
            self._begin_step(rank)

    # At the end

    def _check(self) -> None:
        if self.kind == STOP:
            self._check_answers({r: r.told for r in self.ranks if r.told is not None})
        else:
            for rank in self.ranks:
                if len(rank.saved) > 1:
                    self.violations.append("a rank saves twice")
            self._check_answers({r: r.saved[0] for r in self.ranks if r.saved})
        for rank in self.ranks:
            word = rank.slot.read_words()[calls.CALL]
            if word & 3 == calls.WAITS and self.now - rank.entered_at > calls.WAIT_SECONDS + 15.0:
                self.violations.append("a rank still waits")
            nodes = {0, rank.node.index}
            if rank.has_waited_out and self._trouble_of(nodes, rank) < MOST_TROUBLE:
                self.violations.append(f"a rank waits in vain at {rank.has_waited_out}")

    def _check_answers(self, answers: dict[SimulatedRank, int]) -> None:
        if len(set(answers.values())) > 1:
            self.violations.append(f"the ranks stop at {sorted(set(answers.values()))}")
        if not answers:
            is_stuck = (
                any(r.has_waited_out or r.is_dead for r in self.ranks) or not self._is_coupled
            )
            if self.committed_at is not None and not is_stuck and self.now < self._end:
                self.violations.append("no rank stops after the commit")
            return
        call = min(answers.values())
        for rank in self.ranks:
            cut_off = any(
                r.has_waited_out and self._trouble_of({rank.node.index}, r) >= MOST_TROUBLE
                for r in self._ranks_of(rank.node)
            )
            if rank in answers or cut_off or rank.is_dead:
                continue
            others_out = any(r.has_waited_out for r in self.ranks)
            if rank.left >= call:
                self.violations.append(f"a rank is at {rank.left}, others stop at {call}")
            elif (
                self._is_coupled
                and not others_out
                and not any(r.is_dead for r in self.ranks)
                and self.now < self._end
            ):
                self.violations.append(f"a rank does not reach {call}")

    def _trouble_of(self, nodes: set[int], rank: SimulatedRank) -> float:
        """For how many seconds of a wait in vain these nodes were frozen or not connected."""
        end = rank.waited_until
        seconds, covered = 0.0, end - calls.WAIT_SECONDS
        for node, begin, until in sorted(self._trouble, key=lambda each: each[1]):
            begin, until = max(begin, covered), min(until, end)
            if node in nodes and until > begin:
                seconds, covered = seconds + until - begin, until
        return seconds
