"""The rounds of this node, for the main thread: wait for a start, notice a stop, report the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Callable, NamedTuple, Protocol

from ..cause import Cause, LaunchError
from ..output import say
from ..supervise import is_stopping
from .checkpoints import CheckpointNews, Saved, digest
from .connection import LeaderConnection
from .existence import PathCheck
from .leader import GangLeader, Predecessor, Restarts, TransportUse
from .member import GangMember
from .messages import (
    FAILED,
    NEVER,
    EndGang,
    GangOrder,
    MemberState,
    NcclTransport,
    OpenGate,
    RoundCode,
    StartRound,
    StopRound,
)
from .policy import RestartLimits, RestartPolicy
from .stopping import Agreement, Vote

if TYPE_CHECKING:
    from .server import GangServer

_POLL = 0.05  # seconds between two looks at the annotations of the leader
_LINE_SECONDS = 10.0  # between two lines about a wait
# On a node whose command failed, and on the others.
_FAILED_EDIT = "the next edit"
_OTHER_EDIT = "newer code after the failure of another node"
_NAMED_NODES = 8  # in a line
_PORT_SECONDS = 10.0  # for another process to release the port
# How long a node without ranks waits for the leader of its earlier rounds, if it is gone.
_LEADERLESS_SECONDS = 15.0
# At the end of node 0, for other nodes to report what their ranks have just saved.
_SAVES_SECONDS = 2.5


class GangNode(NamedTuple):
    """This node of the gang, by its node rank.

    host, port: of the leader; port 0: each node is its own leader. is_head: node 0 is the head of
    the job.
    """

    rank: int
    size: int
    host: str
    port: int
    key: str
    is_head: bool = False

    @property
    def is_leader(self) -> bool:
        """Whether this launcher decides for the gang."""
        return self.rank == 0 or not self.port


class GangLink(Protocol):
    """The way to the leader."""

    @property
    def leader(self) -> GangLeader | None:
        """The leader if it is of this node. What it knows may be read in any thread."""

    def report(self, state: MemberState) -> None:
        """Report the state of this node."""

    def vote(self, vote: Vote) -> None:
        """Send the vote of this node on a planned stop."""

    def lost_seconds(self) -> float:
        """For how long there has been no connection; 0 with one."""

    def describe_wait(self) -> str:
        """What this node waits for, for its log."""

    def check_reachable(self) -> None:
        """Raise LaunchError (ChannelFailed) if the leader cannot be reached for too long."""

    def close(self) -> None:
        """End the connections of this node."""


class OrderInbox:
    """The newest order and agreement of the leader, which other threads put here."""

    def __init__(self) -> None:
        self.order: GangOrder | None = None
        self.agreement: Agreement | None = None
        self._changed = threading.Condition()

    def put(self, message: GangOrder | Agreement | None) -> None:
        """Replace the order or the agreement, and wake the main thread; None removes both."""
        with self._changed:
            if message is None or isinstance(message, Agreement):
                self.agreement = message
            if not isinstance(message, Agreement):
                self.order = message
            self._changed.notify_all()
        # `supervise` waits for signals, and looks at the order after each.
        os.kill(os.getpid(), signal.SIGCHLD)

    def wait(self, known: GangOrder | None, seconds: float) -> None:
        """Return once the order is not the known one, or after this time."""
        with self._changed:
            if self.order == known:
                self._changed.wait(seconds)


class OwnLink:
    """The link of the leader to itself, with the server for the others."""

    def __init__(self, node: GangNode, limits: RestartLimits, inbox: OrderInbox) -> None:
        size = node.size if node.port else 1
        self.leader = GangLeader(size, RestartPolicy(limits), is_head=node.is_head)
        self._inbox = inbox
        self._server: GangServer | None = None
        if node.port and node.size > 1:
            from .server import GangServer  # asyncio takes 60 ms to import

            self._server = GangServer(node.port, node.size, node.key, self.leader, inbox.put)

    def call(self, function: Callable[[GangLeader, float], None]) -> None:
        """Run a function with the leader and the present time."""
        if self._server is not None:
            self._server.call(function)
            return
        function(self.leader, time.monotonic())
        agreement, order = self.leader.agreement, self.leader.order
        if agreement is not None and agreement != self._inbox.agreement:
            self._inbox.put(agreement)
        if order is not None and order != self._inbox.order:
            self._inbox.put(order)

    def report(self, state: MemberState) -> None:
        """Report the state of this node."""
        self.call(lambda leader, now: leader.receive(0, state, now))

    def vote(self, vote: Vote) -> None:
        """Note how this node votes on a planned stop."""
        self.call(lambda leader, now: leader.receive_vote(0, vote, now))

    def tick(self) -> None:
        """Let time pass for the leader; a server does so itself."""
        if self._server is None:
            self.call(GangLeader.tick)

    def open_gate(self, predecessor: Predecessor) -> None:
        """Allow the first round."""
        self.call(lambda leader, now: leader.open_gate(now, predecessor))

    def announce(self, code: RoundCode, edit_wait: float) -> None:
        """Set the code of the next round, and how long a failed round waits for an edit."""
        self.call(lambda leader, now: leader.announce(code, edit_wait, now))

    def lost_seconds(self) -> float:
        """Always 0: there is no connection to lose."""
        return 0.0

    def describe_wait(self) -> str:
        """Name the nodes that have not connected yet."""
        missing = self.leader.missing()
        if not missing:
            return "the other nodes of the gang"
        more = f" and {len(missing) - _NAMED_NODES} more" if len(missing) > _NAMED_NODES else ""
        nodes = ", ".join(map(str, missing[:_NAMED_NODES]))
        return f"{'nodes' if len(missing) > 1 else 'node'} {nodes}{more} of the gang"

    def check_reachable(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """End once the other nodes have the last order."""
        if self._server is not None:
            self._server.close()


class Rounds:
    """Reports what this node does and follows the orders of the leader.

    `look` is called often while this node waits, and before each check for a stop. `pass_gate` is
    called once, when the gate of the leader is open.
    """

    def __init__(
        self,
        link: GangLink,
        inbox: OrderInbox,
        look: Callable[[], None],
        pass_gate: Callable[[], None] | None = None,
    ) -> None:
        self._pass_gate = pass_gate
        self._link = link
        self._inbox = inbox
        self._look = look
        self._member = GangMember()
        self._reported: MemberState | None = None
        self.has_awaited_edit = False  # after any failed round of the gang
        self._left_at: float | None = None
        self._report()

    def await_start(self, on_edit_wait: Callable[[], None] = lambda: None) -> StartRound | None:
        """Wait for the start of the next round; None if this node is to end.

        on_edit_wait: called once if a failed gang waits for an edit, in development mode.

        A blocked signal that asks the process to end, ends the wait and stays pending. Raises
        LaunchError (ChannelFailed) if the leader cannot be reached.
        """
        wait = _WaitLine()
        check = PathCheck()
        awaits_edit = False
        while True:
            self._look()
            order = self._inbox.order
            if self._pass_gate and order is not None and not isinstance(order, EndGang):
                pass_gate, self._pass_gate = self._pass_gate, None
                pass_gate()
            step = self._member.follow(order)
            self._check_paths(order, check)
            self._report()
            if isinstance(step, StartRound):
                return step
            if step is not None or self._is_leaderless():
                return None
            if is_stopping():
                self.leave()
                return None
            self._link.check_reachable()
            edit = self._awaited_edit(order)
            if edit and not awaits_edit:
                awaits_edit = self.has_awaited_edit = True
                on_edit_wait()
            wait.write(self._link, edit)
            self._inbox.wait(order, _POLL)

    def earlier_cause(self) -> tuple[int, Cause] | None:
        """The node and the cause of an earlier round, if the gang ends because of that round."""
        order = self._inbox.order
        if not isinstance(order, EndGang) or order.cause is None:
            return None
        return order.node, order.cause

    @property
    def newest_round(self) -> int:
        """The newest round that this node started, or will not start any more; NEVER at first."""
        return self._member.state.round

    def stop_order(self) -> StopRound | None:
        """The order to end the ranks of the present round, if there is one."""
        self._look()
        return self._member.stop(self._inbox.order)

    def agreement(self) -> Agreement | None:
        """What the ranks of the gang agree on, for a planned stop."""
        return self._inbox.agreement

    def vote(self, vote: Vote) -> None:
        """Send the vote of this node on a planned stop."""
        self._link.vote(vote)

    def end(
        self, cause: Cause | None, step: int | None, *, stopped: bool, is_silent: bool = False
    ) -> None:
        """Report the end of the command of this round. stopped: by an order."""
        self._look()  # newer code wins over the failure of older code
        self._member.end(cause, step, stopped=stopped, is_silent=is_silent)
        self._report()

    def save(self, saved: tuple[Saved, ...]) -> None:
        """Report what the ranks of this node have saved, if that has changed."""
        self._member.save(saved)
        self._report()

    def checkpoints(self) -> CheckpointNews:
        """The complete checkpoints of the gang; none on other nodes than the first."""
        leader = self._link.leader
        return leader.checkpoints() if leader else CheckpointNews()

    def await_saves(self, grace: float | None) -> None:
        """Wait on the first node, before it ends, for what other nodes have saved of a checkpoint.

        grace: seconds that their ranks have if Kubernetes ends the pods.
        """
        until = time.monotonic() + _SAVES_SECONDS
        if self._left_at is not None:
            until = self._left_at + (grace or 0.0)
        while self.checkpoints().is_awaited and time.monotonic() < until:
            time.sleep(_POLL)

    def restarts(self) -> Restarts:
        """The failures that were followed by another round; none on other nodes than the first."""
        leader = self._link.leader
        return leader.restarts() if leader else Restarts()

    def note(self, training: str) -> None:
        """Report how the processes of this node train, if that has changed."""
        self._member.note(training)
        self._report()

    def is_debugged(self, here: bool) -> bool:
        """Whether someone debugs a rank of the gang. here: on this node, which is reported."""
        self._member.debug(here)
        self._report()
        order = self._inbox.order
        return here or (isinstance(order, StartRound) and order.is_debugged)

    def trains_alone(self) -> bool:
        """Whether the gang trains alone; False on other nodes than the first."""
        leader = self._link.leader
        return leader is not None and leader.trains_alone()

    def note_transport(self, transport: NcclTransport) -> None:
        """Report the network that NCCL uses on this node."""
        self._member.note_transport(transport)
        self._report()

    def networks(self) -> tuple[TransportUse, ...]:
        """The networks that nodes use; none on other nodes than the first."""
        leader = self._link.leader
        return leader.networks() if leader else ()

    def leave(self) -> None:
        """Report that Kubernetes ends this pod."""
        self._left_at = self._left_at or time.monotonic()
        self._member.leave()
        self._report()

    def _awaited_edit(self, order: GangOrder | None) -> str:
        """What a failed gang waits for in development mode; "" if it does not."""
        if not (isinstance(order, StopRound) and order.edit):
            return ""
        return _FAILED_EDIT if self._member.state.state == FAILED else _OTHER_EDIT

    def _check_paths(self, order: GangOrder | None, check: PathCheck) -> None:
        """Look for the checkpoints of an order that precedes a start, once for each start."""
        candidates = order.checkpoints if isinstance(order, (OpenGate, StopRound)) else ()
        name = digest(candidates)
        if name and name != self._member.state.checked:
            missing = check.look(candidates)
            if missing is not None:
                self._member.check(name, missing)

    def _report(self) -> None:
        if self._member.state != self._reported:
            self._reported = self._member.state
            self._link.report(self._reported)

    def _is_leaderless(self) -> bool:
        has_started = self._member.state.round > NEVER
        if not has_started or self._link.lost_seconds() <= _LEADERLESS_SECONDS:
            return False
        say("the first node of the gang is gone: this node ends")
        return True

    def close(self) -> None:
        """End the connections of this node."""
        self._link.close()


class _WaitLine:
    """The lines about a wait, one every _LINE_SECONDS. The plugin recognises _FAILED_EDIT."""

    def __init__(self) -> None:
        self._start = self._last_line = time.monotonic()
        self._for_edit = False

    def write(self, link: GangLink, edit: str) -> None:
        """Write the line, if it is time. edit: what the gang waits for, "" for other nodes."""
        now = time.monotonic()
        if edit and not self._for_edit:
            self._for_edit, self._start, self._last_line = True, now, now
            say(f"development mode: the pod waits for {edit}")
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            what = f"{edit}: kubectl torchrun sync" if edit else link.describe_wait()
            say(f"waiting for {what} ({now - self._start:.0f} s)")


def lead(
    node: GangNode,
    limits: RestartLimits,
    pass_gate: Callable[[], Predecessor],
    look: Callable[[OwnLink], None],
) -> Rounds:
    """Lead the gang. The other nodes may connect while this one waits in `pass_gate`.

    On the network of the host, the leader of the gang before may still have the port until its pods
    have ended, and the gate opens then. look: called often in the main thread. Raises LaunchError
    (ChannelFailed), and what `pass_gate` raises.
    """
    inbox = OrderInbox()
    link = _make_link(node, limits, inbox, 0.0)
    predecessor = pass_gate()
    link = link or _make_link(node, limits, inbox, _PORT_SECONDS)
    assert link is not None
    own = link
    look(own)
    own.open_gate(predecessor)

    def look_and_tick() -> None:
        look(own)
        own.tick()

    return Rounds(own, inbox, look_and_tick)


def _make_link(
    node: GangNode, limits: RestartLimits, inbox: OrderInbox, seconds: float
) -> OwnLink | None:
    """The link of the leader. While its port is taken: None, or LaunchError after some seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            return OwnLink(node, limits, inbox)
        except LaunchError:
            if not seconds:
                return None
            if time.monotonic() >= until:
                raise
        time.sleep(_POLL)


def follow(node: GangNode, pass_gate: Callable[[], None] | None, reach_wait: float) -> Rounds:
    """Follow the leader of the gang. pass_gate: called once its gate is open, in `await_start`.

    reach_wait: seconds for which the network may not reach the pod of the leader.
    """
    inbox = OrderInbox()
    connection = LeaderConnection(node.host, node.port, node.rank, node.key, inbox, reach_wait)
    return Rounds(connection, inbox, lambda: None, pass_gate)
