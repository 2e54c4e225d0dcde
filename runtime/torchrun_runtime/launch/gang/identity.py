"""Which launcher speaks for a node: Kubernetes may replace a pod while the others stay. Pure."""

from __future__ import annotations

from typing import NamedTuple

from .messages import DONE, LEAVING, NEVER, InvalidMessageError, MemberState


class LauncherId(NamedTuple):
    """One process of a launcher.

    predecessors: how many pods of the same index the Job had before the pod of this launcher.
    """

    instance: str
    predecessors: int


class KnownLaunchers:
    """The launchers that speak for the nodes of a gang, as its leader knows them."""

    def __init__(self) -> None:
        self._of_node: dict[int, LauncherId] = {}

    def check(
        self,
        index: int,
        launcher: LauncherId,
        *,
        has_started: bool,
        is_stopping: bool,
        is_connected: bool = True,
    ) -> None:
        """Raise InvalidMessageError if the launcher of a node may not join.

        A pod that replaces another one waits until the ranks of that one are dead before it
        connects. Without that proof, a gang that has started takes no other launcher of a node, and
        no other one than that it knows while ranks of an earlier leader stop.

        Before that, no rank runs. A launcher then takes the place of one whose pod has replaced
        more pods only after the end of its connection (`is_connected`): a Job that is suspended
        and resumes counts from 0 again, and one of its earlier pods may have joined and ended late.
        """
        known = self._of_node.get(index)
        if known is not None and launcher.predecessors < known.predecessors and is_connected:
            raise InvalidMessageError("a newer pod of this node has joined")
        is_newer = launcher.predecessors > (known.predecessors if known else 0)
        is_closed = has_started or (is_stopping and known is not None)
        if is_closed and launcher != known and not is_newer:
            # Kueue may end the pods of a Job and create others with the same key.
            raise InvalidMessageError("another launcher of this node has started")

    def join(self, index: int, launcher: LauncherId) -> bool:
        """Note the launcher of a node, after `check`. Whether it takes the place of another one."""
        known = self._of_node.get(index)
        self._of_node[index] = launcher
        return known is not None and launcher != known


def check_leader(state: MemberState, known: LauncherId | None, leader: LauncherId) -> None:
    """Check that a node in this state may follow this leader.

    A node that has started follows only a leader whose pod has replaced the one before. known: the
    leader that the node was connected to. Raises InvalidMessageError.
    """
    if known is None or leader == known:
        return
    if state.state in (LEAVING, DONE):
        raise InvalidMessageError("this node ends")
    if state.round > NEVER and leader.predecessors <= known.predecessors:
        raise InvalidMessageError("it is not the launcher that started the ranks")


def read_launcher(body: dict[str, object]) -> LauncherId:
    """The launcher that a message of the greeting names. An older one has no predecessors."""
    count = body.get("predecessors")
    return LauncherId(str(body.get("instance")), count if isinstance(count, int) else 0)
