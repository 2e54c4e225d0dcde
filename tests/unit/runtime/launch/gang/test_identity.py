"""Which launcher speaks for a node, and which leader a node follows."""

import pytest

from torchrun_runtime.launch.gang.identity import (
    KnownLaunchers,
    LauncherId,
    check_leader,
    read_launcher,
)
from torchrun_runtime.launch.gang.messages import (
    LEAVING,
    RUNNING,
    InvalidMessageError,
    MemberState,
)

FIRST, SECOND = LauncherId("a", 0), LauncherId("b", 0)
NEW, NEWER = LauncherId("c", 1), LauncherId("d", 2)


def join(
    launchers: KnownLaunchers, launcher: LauncherId, when: str = "", *, is_connected: bool = True
) -> bool:
    launchers.check(
        1,
        launcher,
        has_started=when == "has started",
        is_stopping=when == "is stopping",
        is_connected=is_connected,
    )
    return launchers.join(1, launcher)


@pytest.mark.parametrize("when", ["has started", "is stopping"])
def test_a_pod_joins_a_gang_that_has_ranks_only_if_it_replaces_the_one_before(when: str) -> None:
    launchers = KnownLaunchers()
    assert not join(launchers, FIRST)
    assert join(launchers, SECOND), "as after a suspension by Kueue"
    with pytest.raises(InvalidMessageError):
        join(launchers, FIRST, when)
    assert not join(launchers, SECOND, when), "the same one connects again"
    assert join(launchers, NEW, when)
    assert join(launchers, NEWER, when)


def test_a_new_leader_accepts_nodes_that_it_does_not_know_while_others_stop() -> None:
    assert not join(KnownLaunchers(), FIRST, "is stopping")
    with pytest.raises(InvalidMessageError):
        join(KnownLaunchers(), FIRST, "has started")


@pytest.mark.parametrize("when", ["has started", "is stopping", ""])
def test_a_lost_pod_does_not_join_beside_its_replacement(when: str) -> None:
    launchers = KnownLaunchers()
    join(launchers, NEW)
    with pytest.raises(InvalidMessageError, match="a newer pod"):
        join(launchers, FIRST, when)


def test_a_pod_of_a_resumed_job_joins_once_one_from_before_the_suspension_is_gone() -> None:
    launchers = KnownLaunchers()
    join(launchers, NEW)
    with pytest.raises(InvalidMessageError, match="a newer pod"):
        join(launchers, FIRST)
    assert join(launchers, FIRST, is_connected=False)


@pytest.mark.parametrize("when", ["has started", "is stopping"])
def test_a_pod_that_counts_less_joins_no_ranks(when: str) -> None:
    launchers = KnownLaunchers()
    join(launchers, NEW)
    with pytest.raises(InvalidMessageError):
        join(launchers, FIRST, when, is_connected=False)


def test_a_launcher_that_is_only_checked_does_not_speak_for_its_node() -> None:
    launchers = KnownLaunchers()
    launchers.check(1, NEW, has_started=False, is_stopping=False)
    assert not join(launchers, FIRST)


@pytest.mark.parametrize(
    ("state", "known", "leader", "follows"),
    [
        (MemberState(), FIRST, SECOND, True),
        (MemberState(RUNNING, 0), None, FIRST, True),
        (MemberState(RUNNING, 0), FIRST, FIRST, True),
        (MemberState(RUNNING, 0), FIRST, SECOND, False),
        (MemberState(RUNNING, 0), FIRST, NEW, True),
        (MemberState(RUNNING, 0), NEWER, NEW, False),
        (MemberState(LEAVING, 0), FIRST, NEW, False),
        (MemberState(LEAVING, 0), FIRST, FIRST, True),
    ],
)
def test_a_node_that_has_started_follows_only_the_replacement_of_its_leader(
    state: MemberState, known: LauncherId | None, leader: LauncherId, follows: bool
) -> None:
    if follows:
        check_leader(state, known, leader)
        return
    with pytest.raises(InvalidMessageError):
        check_leader(state, known, leader)


@pytest.mark.parametrize("count", [None, "1", 1.5])
def test_a_launcher_without_a_number_has_no_predecessors(count: object) -> None:
    body: dict[str, object] = {"instance": "a", "predecessors": count}
    assert read_launcher(body) == FIRST
