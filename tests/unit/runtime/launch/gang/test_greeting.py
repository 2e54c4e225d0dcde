"""Which launcher speaks for a node, and which leader a node follows."""

import pytest

from torchrun_runtime.launch.gang.greeting import KnownLaunchers, check_leader
from torchrun_runtime.launch.gang.messages import LEAVING, RUNNING, InvalidMessageError, MemberState

FIRST, SECOND = "a", "b"


def join(launchers: KnownLaunchers, launcher: str, *, has_started: bool = False) -> None:
    launchers.check(1, launcher, has_started=has_started)
    launchers.join(1, launcher)


def test_the_latest_launcher_of_a_node_joins_until_the_gang_has_started() -> None:
    launchers = KnownLaunchers()
    join(launchers, FIRST)
    join(launchers, SECOND)
    with pytest.raises(InvalidMessageError):
        join(launchers, FIRST, has_started=True)
    join(launchers, SECOND, has_started=True)


def test_a_node_that_never_joined_does_not_join_a_gang_that_has_started() -> None:
    with pytest.raises(InvalidMessageError):
        join(KnownLaunchers(), FIRST, has_started=True)


def test_a_launcher_that_is_only_checked_does_not_speak_for_its_node() -> None:
    launchers = KnownLaunchers()
    join(launchers, FIRST)
    launchers.check(1, SECOND, has_started=False)
    join(launchers, FIRST, has_started=True)


@pytest.mark.parametrize(
    ("state", "known", "leader", "follows"),
    [
        (MemberState(), FIRST, SECOND, True),
        (MemberState(RUNNING, 0), None, FIRST, True),
        (MemberState(RUNNING, 0), FIRST, FIRST, True),
        (MemberState(RUNNING, 0), FIRST, SECOND, False),
        (MemberState(LEAVING), FIRST, SECOND, False),
        (MemberState(LEAVING, 0), FIRST, FIRST, True),
    ],
)
def test_a_node_that_has_started_follows_only_the_leader_that_started_it(
    state: MemberState, known: str | None, leader: str, follows: bool
) -> None:
    if follows:
        check_leader(state, known, leader)
        return
    with pytest.raises(InvalidMessageError):
        check_leader(state, known, leader)
