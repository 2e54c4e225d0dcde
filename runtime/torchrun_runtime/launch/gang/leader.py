"""The decisions of the leader: which order all members get. Pure, without I/O and clock."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Protocol

from ..cause import Cause, first_cause, is_peer_loss
from .checkpoints import (
    CheckpointLedger,
    CheckpointNews,
    CompleteCheckpoint,
    SkippedCheckpoint,
    choose,
    digest,
)
from .messages import (
    ALONE,
    LEAVING,
    NEVER,
    RUNNING,
    SUCCEEDED,
    TOGETHER,
    EndGang,
    GangOrder,
    MemberState,
    NcclTransport,
    OpenGate,
    RoundCode,
    StartRound,
    StopRound,
)
from .policy import RoundFailure, Verdict
from .stopping import Agreement, Agreements, Vote

# How long a member may be without a connection when the others wait for it.
LOST_SECONDS = 15.0
# How long the ranks of all nodes may take to stop: a process that the kernel holds does not end.
STOP_SECONDS = 30.0
# How long ranks go on after others have lost a peer: the stop would kill the rank that is the cause
# before its launcher has reported it.
PEER_SECONDS = 10.0


class RestartedRound(NamedTuple):
    """A round that failed and is followed by another one in the same pods.

    node: index of the node with the cause. seconds: how long the round ran. step: the newest one,
    None without reports.
    """

    round: int
    node: int
    seconds: float
    cause: Cause
    step: int | None = None


class Restarts(NamedTuple):
    """The restarts in place of a gang, those of an earlier pod of node 0 included.

    last: the newest of them, without those that an earlier pod decided. awaits_edit: the failed
    round that waits for the next edit instead, in development mode.
    """

    total: int = 0
    last: tuple[RestartedRound, ...] = ()
    awaits_edit: RestartedRound | None = None


class TransportUse(NamedTuple):
    """How many nodes use a network, and the lowest index of them."""

    transport: NcclTransport
    nodes: int
    first: int


class Predecessor(NamedTuple):
    """What an earlier pod of node 0 left: its restarts in place, and the next number of a round.

    checkpoints: of earlier gangs of the job as well, the newest first.
    """

    restarts: int = 0
    first_round: int = 0
    checkpoints: tuple[CompleteCheckpoint, ...] = ()


NO_PREDECESSOR = Predecessor()


class RestartDecider(Protocol):
    """Decides whether a failed round is followed by another one."""

    @property
    def is_off(self) -> bool:
        """Whether no failure is followed by another round."""

    def judge(self, failed: RoundFailure, restarts: int) -> Verdict:
        """Whether to start another round. Called once for each failure."""


class GangLeader:
    """The state of the gang as its leader knows it, and the order that follows from it.

    The order is the state: before the first round there is none, or OpenGate. While ranks run it is
    StartRound, while they end StopRound, and at last EndGang. `_next` has every transition, except
    for the end that all ranks agree on (`stopping`).

    `size`: the number of nodes. With `is_head` the gang has succeeded once node 0 has: the other
    nodes serve its command, and the controller deletes them. Each method with `now`, in seconds of
    a monotonic clock, may change `order`. The caller sends it to all members, and again to a member
    that connects.
    """

    def __init__(self, size: int, policy: RestartDecider, *, is_head: bool = False) -> None:
        self.order: GangOrder | None = None
        self._size = size
        self._policy = policy
        self._is_head = is_head
        self._states: dict[int, MemberState] = {}
        self._lost: dict[int, float] = {}  # index to the time at which its connection was lost
        self._is_open = False
        self._predecessor = NO_PREDECESSOR
        self._failed_rounds: list[RestartedRound] = []
        self._code = RoundCode()  # of the next round
        self._edit_wait = 0.0
        # Of the present round. `_broken` failed and waits for an edit until `_edit_until`.
        self._started_revision = 0
        self._started_at = self._stopped_at = 0.0
        self._broken: RestartedRound | None = None
        self._edit_until = 0.0
        self._peer_lost_at: float | None = None  # since when the only failures are lost peers
        self._agreements = Agreements(size)
        self._round = NEVER  # the newest that has started
        self._ledger = CheckpointLedger()
        self._skipped: tuple[SkippedCheckpoint, ...] = ()

    @property
    def agreement(self) -> Agreement | None:
        """What the ranks of the present round agree on, for all members, like the order."""
        return self._agreements.present

    @property
    def has_started(self) -> bool:
        """Whether the gang has started a round, or ends."""
        return isinstance(self.order, (StartRound, StopRound, EndGang))

    def open_gate(self, now: float, predecessor: Predecessor = NO_PREDECESSOR) -> None:
        """Allow the first round: no rank of an older gang runs any more."""
        self._is_open = True
        self._predecessor = predecessor
        self._ledger.inherit(predecessor.checkpoints)
        self._decide(now)

    def announce(self, code: RoundCode, edit_wait: float, now: float) -> None:
        """Set the code of the next round, which starts at once if the code is newer.

        edit_wait: seconds for which a failed round waits for newer code, instead of a restart.
        """
        self._edit_wait = edit_wait
        if code.revision > self._code.revision:
            self._code = code
        self._decide(now)

    def receive(self, index: int, state: MemberState, now: float) -> None:
        """Note the state of a member, which is connected."""
        self.note(index, state)
        self._decide(now)

    def note(self, index: int, state: MemberState) -> None:
        """Note the state of a member like `receive`; the caller decides later, by `tick`."""
        self._lost.pop(index, None)
        self._states[index] = state

    def receive_vote(self, index: int, vote: Vote, now: float) -> None:
        """Note how a member votes on a planned stop."""
        self.note_vote(index, vote, now)
        self._decide(now)

    def note_vote(self, index: int, vote: Vote, now: float) -> None:
        """Note the vote of a member like `receive_vote`; the caller decides later, by `tick`."""
        self._agreements.receive(index, vote, now)

    def lose(self, index: int, now: float) -> None:
        """Note that the connection of a member is lost. Its ranks may still run."""
        self._lost.setdefault(index, now)

    def tick(self, now: float) -> None:
        """Decide again, because time has passed."""
        self._decide(now)

    def restarts(self) -> Restarts:
        """The failures that were followed by another round in the same pods, or wait for one."""
        rounds = tuple(self._failed_rounds)
        awaits_edit = isinstance(self.order, StopRound) and self.order.edit
        broken = self._broken if awaits_edit else None
        return Restarts(self._predecessor.restarts + len(rounds), rounds, broken)

    def trains_alone(self) -> bool:
        """Whether a node has imported torch, and no process has a group on any node."""
        found = {state.training for state in self._states.values()}
        return ALONE in found and TOGETHER not in found

    def networks(self) -> tuple[TransportUse, ...]:
        """The networks that nodes use in this round, the most frequent first."""
        nodes: dict[NcclTransport, list[int]] = {}
        for node, state in self._states.copy().items():  # of another thread
            if state.transport is not None:
                nodes.setdefault(state.transport, []).append(node)
        uses = (TransportUse(kind, len(found), min(found)) for kind, found in nodes.items())
        return tuple(sorted(uses, key=lambda use: (-use.nodes, use.first)))

    def checkpoints(self) -> CheckpointNews:
        """The newest complete checkpoints, and those that the present round does without."""
        states = list(self._states.items())  # another thread may add one
        of_round = [(node, state) for node, state in states if state.round == self._round]
        by_rank_0 = [saved for _, state in of_round for saved in state.saved if saved.path]
        is_awaited = bool(by_rank_0) and not self._ledger.is_counted(by_rank_0[-1])
        others = any(
            state.state in (RUNNING, LEAVING) and node and node not in self._lost
            for node, state in of_round
        )
        return CheckpointNews(self._ledger.newest, self._skipped, is_awaited and others)

    def missing(self) -> list[int]:
        """The indexes of the members that have not reported yet, or are lost."""
        present = self._states.keys() - self._lost.keys()
        return [index for index in range(self._size) if index not in present]

    def _decide(self, now: float) -> None:
        self._count_saves()
        while (order := self._next(now)) != self.order:
            before, self.order = self.order, order
            if isinstance(order, StopRound) and not isinstance(before, StopRound):
                self._stopped_at = now
            if isinstance(order, StartRound) and not isinstance(before, StartRound):
                self._round = order.round
                self._count_saves()  # none yet in this round
                self._started_revision, self._started_at = order.code.revision, now
                self._broken = self._peer_lost_at = None
                self._agreements.begin(order.round)
        self._agreements.decide(self._lost, self._obstacle(), now)
        if self._agreements.ends_gang:
            self.order = EndGang()

    def _obstacle(self) -> str:
        """Why the ranks do not run on every node; "" if they do."""
        if not isinstance(self.order, StartRound):
            return "the round ends"
        ended = [n for n, state in self._states.items() if state.state != RUNNING]
        return f"the ranks of node {min(ended)} do not run" if ended else ""

    def _count_saves(self) -> None:
        of_round = (state for state in self._states.values() if state.round == self._round)
        self._ledger.note([state.saved for state in of_round])

    def _next(self, now: float) -> GangOrder | None:
        """The order that follows the present one, which stays if nothing is to change."""
        order = self.order
        if isinstance(order, EndGang):
            return order
        if LEAVING in {state.state for state in self._states.values()}:
            return EndGang()

        if isinstance(order, StartRound):
            order = order._replace(is_debugged=self._is_debugged())
            if self._is_head and self._is_over(order.round, now):
                return EndGang()  # the workers fail because the head has ended
            if self._code.revision > order.code.revision:
                return StopRound(order.round, failed=False)
            causes = self._causes(order.round)
            if not causes:
                return EndGang() if self._is_over(order.round, now) else order
            if self._policy.is_off and not self._edit_wait:
                return EndGang()  # the pod that failed ends at once; the controller ends the others
            return StopRound(order.round) if self._is_cause_known(causes, now) else order

        if isinstance(order, StopRound):
            order = order._replace(checkpoints=self._ledger.newest)  # ranks save while they end
            if not self._all_stopped(order.round):
                return EndGang() if self._is_late(order.round, now) else order
            if not self._have_all_checked():
                return order
            causes = self._causes(order.round)
            if not causes or self._code.revision > self._started_revision:
                return self._start(order.round + 1)
            node, cause = first_cause(causes)
            seconds = self._stopped_at - self._started_at
            failed = RestartedRound(order.round, node, seconds, cause)
            if self._edit_wait:
                return self._await_edit(order, failed, now)
            return self._restart(failed)

        if not self._is_open:
            return None
        if not (self._all_stopped(NEVER) and self._have_all_checked()):
            return OpenGate(checkpoints=self._ledger.newest)
        return self._start(self._predecessor.first_round)

    def _start(self, number: int) -> StartRound:
        missing = {node: state.missing for node, state in self._states.items()}
        checkpoint, self._skipped = choose(self._ledger.newest, missing)
        return StartRound(number, self._code, self.restarts().total, checkpoint=checkpoint)

    def _have_all_checked(self) -> bool:
        """Whether every member has looked for the present candidates, if there are any."""
        wanted = digest(self._ledger.newest)
        return not wanted or all(state.checked == wanted for state in self._states.values())

    def _await_edit(self, stop: StopRound, failed: RestartedRound, now: float) -> GangOrder:
        if self._broken is None:
            self._broken, self._edit_until = failed, now + self._edit_wait
        return stop._replace(edit=True) if now < self._edit_until else EndGang()

    def _restart(self, failed: RestartedRound) -> GangOrder:
        """Start another round if the policy allows it."""
        step = max((s.step for s in self._states.values() if s.step is not None), default=None)
        is_silent = all(state.is_silent for state in self._states.values())
        failure = RoundFailure(failed.cause, failed.seconds, step, is_silent)
        verdict = self._policy.judge(failure, self.restarts().total)
        if verdict.by_leftovers and self._failed_rounds:
            first = self._failed_rounds[-1]
            return EndGang(node=first.node, cause=first.cause)
        if not verdict.restart:
            return EndGang()
        self._failed_rounds.append(failed._replace(step=step))
        return self._start(failed.round + 1)

    def _is_debugged(self) -> bool:
        return any(s.is_debugged for node, s in self._states.items() if node not in self._lost)

    def _is_over(self, number: int, now: float) -> bool:
        """Whether all nodes have succeeded, or have started and are gone without a connection.

        A node whose command succeeds while it cannot reach the leader ends by itself. A node that
        has not started waits for the order, so the others wait for it.
        """
        succeeded = {
            node
            for node, state in self._states.items()
            if (state.state, state.round) == (SUCCEEDED, number)
        }
        if self._is_head:
            return 0 in succeeded
        gone = {
            node
            for node, since in self._lost.items()
            if now - since > LOST_SECONDS and self._states[node].round >= number
        }
        return bool(succeeded) and succeeded | gone == set(range(self._size))

    def _is_cause_known(self, causes: Mapping[int, Cause], now: float) -> bool:
        if len(causes) == self._size or not all(map(is_peer_loss, causes.values())):
            return True
        if self._peer_lost_at is None:
            self._peer_lost_at = now
        return now - self._peer_lost_at >= PEER_SECONDS

    def _is_late(self, number: int, now: float) -> bool:
        """Whether a node is missing for too long, or has not given up this round in time."""
        if any(now - since > LOST_SECONDS for since in self._lost.values()):
            return True
        stopped = [state for state in self._of_round(number) if state.state != RUNNING]
        return len(stopped) < self._size and now - self._stopped_at > STOP_SECONDS

    def _all_stopped(self, number: int) -> bool:
        """Whether every member is connected, and no rank of this round or before runs."""
        return (
            len(self._of_round(number)) == self._size
            and not self._lost
            and all(state.state != RUNNING for state in self._states.values())
        )

    def _of_round(self, number: int) -> list[MemberState]:
        """The states of the members that have started this round or a later one."""
        return [state for state in self._states.values() if state.round >= number]

    def _causes(self, number: int) -> dict[int, Cause]:
        """Why nodes have failed in this round, by node."""
        return {
            node: state.cause
            for node, state in self._states.items()
            if state.round >= number and state.cause is not None
        }
