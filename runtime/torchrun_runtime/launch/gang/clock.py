"""The difference between the clocks of two nodes, as far as a greeting proves it. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..output import TIME_FORMAT
from .messages import MemberState

_LARGEST_TIME = 1e12


def skew_of(claimed: object, sent: float, received: float) -> float:
    """How many seconds the clock of a member is ahead at least; negative if it is behind.

    claimed: its time, which it has read between the two times of the leader. Without it: 0, as with
    an older launcher.
    """
    # NaN, infinity and an integer that is no float are no time either.
    if not isinstance(claimed, (int, float)) or not abs(claimed) < _LARGEST_TIME:
        return 0.0
    return max(claimed - received, 0.0) + min(claimed - sent, 0.0)


def with_time_of_leader(state: MemberState, skew: float) -> MemberState:
    """The state with the time of its cause by the clock of the leader, which compares causes."""
    if state.cause is None or not skew:
        return state
    try:
        moment = datetime.strptime(state.cause.time, TIME_FORMAT) - timedelta(seconds=skew)
    except (ValueError, OverflowError):
        return state
    return state._replace(cause=state.cause._replace(time=moment.strftime(TIME_FORMAT)))
