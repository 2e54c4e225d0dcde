"""What the greeting of two launchers proves: the attempt, the node, the clock. Pure.

Kueue may end the pods of a Job and create others, so a node may have more than one launcher.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime, timedelta

from ..output import TIME_FORMAT
from .messages import LEAVING, NEVER, InvalidMessageError, MemberState

_LARGEST_TIME = 1e12


def proof(key: str, role: str, nonces: tuple[str, str], index: int) -> str:
    """The proof that the sender, the leader or a member, has the key of this attempt."""
    text = "\n".join((role, *nonces, str(index)))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: object, expected: str) -> bool:
    """Whether a received proof is right; takes the same time for each wrong one."""
    return hmac.compare_digest(str(claimed).encode(), expected.encode())


class KnownLaunchers:
    """The launchers that speak for the nodes of a gang, as its leader knows them.

    Each is named by the instance that it sends, which no other launcher has.
    """

    def __init__(self) -> None:
        self._of_node: dict[int, str] = {}

    def check(self, index: int, launcher: str, *, has_started: bool) -> None:
        """Raise InvalidMessageError if the launcher of a node may not join.

        The pods that Kueue creates for a Job that resumes have the key of those before. Before the
        gang starts, no rank runs, and the latest launcher of a node speaks for it.
        """
        if has_started and launcher != self._of_node.get(index):
            raise InvalidMessageError("another launcher of this node has started")

    def join(self, index: int, launcher: str) -> None:
        """Note the launcher of a node, after `check`."""
        self._of_node[index] = launcher


def check_leader(state: MemberState, known: str | None, leader: str) -> None:
    """Check that a node in this state may follow this leader. Raises InvalidMessageError.

    A node that has started follows only the launcher that started its ranks. known: the leader that
    the node was connected to.
    """
    if known is None or leader == known:
        return
    if state.state == LEAVING:
        raise InvalidMessageError("this node ends")
    if state.round > NEVER:
        raise InvalidMessageError("it is not the launcher that started the ranks")


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
