"""What a member does about an order of the leader. Pure."""

from __future__ import annotations

from ..cause import Cause
from .checkpoints import Saved
from .messages import (
    FAILED,
    LEAVING,
    NEVER,
    READY,
    RUNNING,
    SUCCEEDED,
    TOGETHER,
    EndGang,
    GangOrder,
    MemberState,
    NcclTransport,
    StartRound,
    StopRound,
)


class GangMember:
    """The state of this node, which the caller reports to the leader after each change."""

    def __init__(self) -> None:
        self.state = MemberState()

    def follow(self, order: GangOrder | None) -> StartRound | EndGang | None:
        """While no ranks run: start those of a round, end, or wait.

        A round that was stopped before it started here never starts. A node that has never started
        does not end with the gang: Kueue may end the pods of a Job, that of the leader first, and
        create others.
        """
        if isinstance(order, EndGang):
            return order if self.state.round > NEVER else None
        if isinstance(order, StartRound) and order.round > self.state.round:
            self._change(RUNNING, order.round)
            return order
        if isinstance(order, StopRound) and order.round > self.state.round:
            self._change(READY, order.round)
        return None

    def stop(self, order: GangOrder | None) -> StopRound | None:
        """While ranks run: the order to end them."""
        return order if isinstance(order, StopRound) and order.round >= self.state.round else None

    def end(
        self, cause: Cause | None, step: int | None, *, stopped: bool, is_silent: bool = False
    ) -> None:
        """Note that the command has ended and that its ranks are dead. stopped: by an order."""
        name = READY if stopped else FAILED if cause else SUCCEEDED
        self._change(name, self.state.round, cause if name == FAILED else None, step)
        self.state = self.state._replace(is_silent=is_silent)

    def note(self, training: str) -> None:
        """Note how the processes of this node train. A node that once had a group keeps this."""
        if training and self.state.training != TOGETHER:
            self.state = self.state._replace(training=training)

    def note_transport(self, transport: NcclTransport) -> None:
        """Note the network that NCCL uses in this round."""
        self.state = self.state._replace(transport=transport)

    def debug(self, is_debugged: bool) -> None:
        """Note whether someone debugs a rank of this node."""
        self.state = self.state._replace(is_debugged=is_debugged)

    def save(self, saved: tuple[Saved, ...]) -> None:
        """Note what the ranks of this node have saved in the present round."""
        self.state = self.state._replace(saved=saved)

    def check(self, candidates: str, missing: tuple[int, ...]) -> None:
        """Note which of the checkpoints with this digest the node does not have.

        The next round starts with another check.
        """
        self.state = self.state._replace(checked=candidates, missing=missing)

    def leave(self) -> None:
        """Note that Kubernetes ends this pod."""
        self._change(LEAVING, self.state.round)

    def _change(
        self, name: str, number: int, cause: Cause | None = None, step: int | None = None
    ) -> None:
        # The processes of each round connect again.
        transport = None if name == RUNNING else self.state.transport
        training = self.state.training
        saved = self.state.saved if number == self.state.round else ()
        self.state = MemberState(
            name, number, cause, step, training, transport=transport, saved=saved
        )
