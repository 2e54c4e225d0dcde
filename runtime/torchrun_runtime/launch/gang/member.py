"""What a member does about an order of the leader. Pure."""

from __future__ import annotations

from ..failure import Cause
from .messages import (
    DONE,
    FAILED,
    LEAVING,
    NEVER,
    READY,
    RUNNING,
    SUCCEEDED,
    EndGang,
    GangOrder,
    MemberState,
    StartRound,
    StopRound,
)


class GangMember:
    """The state of this node, which the caller reports to the leader after each change.

    replaces_leader: this node leads with a pod that replaces another one.
    """

    def __init__(self, *, replaces_leader: bool = False) -> None:
        self.state = MemberState()
        self._replaces_leader = replaces_leader

    def follow(self, order: GangOrder | None) -> StartRound | EndGang | None:
        """While no ranks run: start those of a round, end, or wait.

        A round that was stopped before it started here never starts. A node that has never started
        does not end with the gang: the leader may be one that ends, and its successor comes. The
        pod of such a successor does, because it has not brought the gang together again in time.
        """
        if isinstance(order, EndGang):
            return order if self.state.round > NEVER or self._replaces_leader else None
        if isinstance(order, StartRound) and order.round > self.state.round:
            self.state = MemberState(
                RUNNING, order.round, restarts=order.restarts, streak=order.streak
            )
            return order
        if isinstance(order, StopRound) and order.round > self.state.round:
            self._change(READY, order.round)
        return None

    def stop(self, order: GangOrder | None) -> StopRound | None:
        """While ranks run: the order to end them."""
        return order if isinstance(order, StopRound) and order.round >= self.state.round else None

    def end(self, cause: Cause | None, step: int | None, *, stopped: bool) -> None:
        """Note that the command has ended and that its ranks are dead. stopped: by an order."""
        name = READY if stopped else FAILED if cause else SUCCEEDED
        self._change(name, self.state.round, cause if name == FAILED else None, step)

    def leave(self) -> None:
        """Note that Kubernetes ends this pod."""
        has_succeeded = self.state.state in (SUCCEEDED, DONE)
        self._change(DONE if has_succeeded else LEAVING, self.state.round)

    def _change(
        self, name: str, number: int, cause: Cause | None = None, step: int | None = None
    ) -> None:
        self.state = self.state._replace(state=name, round=number, cause=cause, step=step)
