"""Which launcher speaks for a node: Kueue may end the pods of a Job and create others. Pure."""

from __future__ import annotations

from .messages import LEAVING, NEVER, InvalidMessageError, MemberState


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
