"""The pod of a node that has succeeded ends before the others: they go on, without another round."""

import json
import subprocess

import pytest

from torchrun_runtime.launch.gang.identity import LauncherId, check_leader
from torchrun_runtime.launch.gang.leader import STOP_SECONDS, GangLeader
from torchrun_runtime.launch.gang.messages import (
    DONE,
    FAILED,
    READY,
    RUNNING,
    SUCCEEDED,
    EndGang,
    InvalidMessageError,
    MemberState,
    RoundCode,
    StartRound,
    StopRound,
    decode_state,
    encode_state,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from unit.runtime.launch.gang.test_gang import GangFactory, await_line, make_gang
from unit.runtime.launch.gang.test_leader import cause, gang, run

__all__ = ["make_gang"]

WAIT = 300.0  # seconds for a new pod


@pytest.mark.parametrize("replace_seconds", [0.0, WAIT])
def test_there_is_no_further_round_beside_a_pod_that_has_succeeded_and_ends(
    replace_seconds: float,
) -> None:
    leader = gang(3, 3, replace_seconds)
    run(leader, 0, 3)
    leader.receive(1, MemberState(SUCCEEDED, 0), 1)
    assert leader.order == StartRound(0)
    leader.receive(1, decode_state(encode_state(MemberState(DONE, 0))), 2)
    assert leader.order == EndGang(), "ranks that run are not disturbed"
    leader.lose(1, 2)
    leader.announce(RoundCode(1), 0, 3)
    leader.receive(0, MemberState(FAILED, 0, cause()), 4)
    assert leader.order == EndGang()


def test_a_pod_that_ends_while_a_round_stops_ends_the_gang_once_the_ranks_have_stopped() -> None:
    leader = gang(3, 3, WAIT)
    run(leader, 0, 3)
    leader.receive(1, MemberState(SUCCEEDED, 0), 1)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.receive(1, MemberState(DONE, 0), 2)
    leader.lose(1, 2)
    assert leader.order == StopRound(0), "the ranks of node 2 run"
    leader.receive(2, MemberState(READY, 0), 3)
    assert leader.order == EndGang()


def test_a_pod_that_ends_before_it_has_the_order_of_the_next_round_stops_the_others() -> None:
    leader = gang(3, 3, WAIT)
    run(leader, 0, 3)
    leader.announce(RoundCode(1), 0, 1)
    assert leader.order == StopRound(0, failed=False)
    leader.receive(1, MemberState(SUCCEEDED, 0), 1)
    for index in (0, 2):
        leader.receive(index, MemberState(READY, 0), 1)
    assert leader.order == StartRound(1, RoundCode(1))
    leader.receive(0, MemberState(RUNNING, 1), 2)
    leader.receive(1, MemberState(DONE, 0), 2)
    leader.lose(1, 2)
    assert leader.order == StopRound(1, lost=True)
    leader.receive(2, MemberState(READY, 1), 2)
    leader.tick(2 + STOP_SECONDS)
    assert leader.order == StopRound(1, lost=True)
    leader.receive(0, MemberState(READY, 1), 3 + STOP_SECONDS)
    assert leader.order == EndGang(), "its pod is not replaced"


def test_a_new_leader_ends_a_gang_with_such_a_pod() -> None:
    leader = GangLeader(3, RestartPolicy(RestartLimits(3)), replace_seconds=WAIT)
    leader.receive(1, MemberState(SUCCEEDED, 5), 0)
    leader.receive(2, MemberState(RUNNING, 5), 0)
    leader.receive(1, MemberState(DONE, 5), 1)
    leader.lose(1, 1)
    assert leader.order == StopRound(5, lost=True)
    leader.receive(2, MemberState(READY, 5), 2)
    assert leader.order == EndGang()


def test_such_a_node_follows_no_other_leader() -> None:
    first, second = LauncherId("a", 0), LauncherId("b", 1)
    check_leader(MemberState(SUCCEEDED, 0), first, second)
    with pytest.raises(InvalidMessageError, match="this node ends"):
        check_leader(MemberState(DONE, 0), first, second)


# One node succeeds at once, and the other one when the test permits it.
SAVES_LATE = """
echo "round $TORCHRUN_ROUND"
[ "$NODE_RANK" = "$FIRST" ] && exit 0
while [ ! -e "$SHARED/go" ]; do sleep 0.05; done
echo saved
exit "$CODE"
"""


@pytest.mark.long
@pytest.mark.parametrize(("first", "code"), [(1, 0), (1, 3), (0, 0)])
def test_a_pod_that_has_succeeded_may_end_before_the_others(
    make_gang: GangFactory, first: int, code: int
) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    limits = {"restarts": 3, "exitCodes": [], "signals": [], "replaceSeconds": WAIT}
    running = gang.start(
        SAVES_LATE,
        TORCHRUN_IN_PLACE_RESTARTS=json.dumps(limits),
        FIRST=str(first),
        CODE=str(code),
    )
    other = running[1 - first]
    assert other.line() == "round 0"
    await_line(running[first], "waiting for the other nodes of the gang")
    running[first].stop()
    ended = running[first].end()
    assert (ended.exit_code, ended.message) == (0, {})
    with pytest.raises(subprocess.TimeoutExpired):
        other.process.wait(2)
    (gang.launchers[0].directory / "go").touch()
    result = other.end()
    assert (result.exit_code, result.out) == (code, "saved\n")
    assert "stopping the ranks" not in result.err
