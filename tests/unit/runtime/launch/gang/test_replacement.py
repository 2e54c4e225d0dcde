"""A pod of a gang is lost: the others keep theirs, and wait for the pod that replaces it."""

import pytest

from torchrun_runtime.launch.gang.leader import STOP_SECONDS, GangLeader, Predecessor
from torchrun_runtime.launch.gang.member import GangMember
from torchrun_runtime.launch.gang.messages import (
    FAILED,
    LEAVING,
    READY,
    RUNNING,
    SUCCEEDED,
    EndGang,
    MemberState,
    OpenGate,
    RoundCode,
    StartRound,
    StopRound,
    decode_order,
    decode_state,
    encode_order,
    encode_state,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from unit.runtime.launch.gang.test_leader import LOST_PEER, cause, gang, restarted, run

WAIT = 300.0  # seconds for a new pod


def running(size: int = 2, restarts: int = 3) -> GangLeader:
    leader = gang(size, restarts, WAIT)
    run(leader, 0, size)
    return leader


def test_a_round_follows_once_the_new_pod_is_there_and_is_no_restart_of_the_ranks() -> None:
    leader = running()
    leader.lose(1, 1)
    leader.tick(100)
    assert leader.order == StartRound(0), "the others may succeed without the connection"
    leader.receive(0, MemberState(FAILED, 0, LOST_PEER), 100)
    leader.tick(110)
    assert leader.order == StopRound(0)
    leader.replace(1, 111)
    assert leader.missing() == [1]
    leader.receive(1, MemberState(), 112)
    assert leader.order == StopRound(0), "it may start round 0 until it gives it up"
    leader.receive(1, MemberState(READY, 0), 112)
    assert leader.order == StartRound(1)
    assert leader.restarts().total == 0


def test_a_pod_that_leaves_stops_the_others_and_is_waited_for() -> None:
    leader = running()
    leader.receive(1, MemberState(LEAVING, 0), 1)
    assert leader.order == StopRound(0, lost=True)
    leader.receive(0, MemberState(READY, 0), 2)
    leader.tick(2 * STOP_SECONDS)
    assert leader.order == StopRound(0, lost=True), "its ranks may save a checkpoint"
    leader.lose(1, 61)
    leader.replace(1, 70)
    leader.receive(1, MemberState(READY, 0), 71)
    assert leader.order == StartRound(1)


@pytest.mark.parametrize("leaves", [True, False])
def test_the_wait_for_a_new_pod_is_limited(leaves: bool) -> None:
    leader = running()
    if leaves:
        leader.receive(1, MemberState(LEAVING, 0), 1)
    leader.lose(1, 1)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.tick(1 + WAIT)
    assert isinstance(leader.order, StopRound)
    leader.tick(2 + WAIT)
    assert leader.order == EndGang()


def test_a_new_pod_that_does_not_report_is_waited_for_no_longer() -> None:
    leader = running()
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.replace(1, 1)
    leader.tick(2 + WAIT)
    assert leader.order == EndGang()


def test_a_new_pod_stops_the_ranks_that_wait_for_those_of_the_lost_one() -> None:
    leader = running(3)
    leader.replace(1, 30)
    assert leader.order == StopRound(0, lost=True)
    for index in range(3):
        leader.receive(index, MemberState(READY, 0), 31)
    assert leader.order == StartRound(1)


def test_the_failure_of_a_lost_pod_is_left_to_the_controller() -> None:
    leader = running(3, restarts=1)
    for number in range(3):
        run(leader, number, 3)
        leader.receive(2, MemberState(FAILED, number, cause("NCCL error")), 1)
        leader.replace(1, 2)
        for index in (0, 1):
            leader.receive(index, MemberState(READY, number), 3)
        assert leader.order == StartRound(number + 1)
    run(leader, 3, 3)
    leader.receive(2, MemberState(FAILED, 3, cause()), 4)
    for index in (0, 1):
        leader.receive(index, MemberState(READY, 3), 4)
    assert restarted(leader) == StartRound(4, restarts=1), "a failure of a rank counts again"


def test_ranks_that_do_not_stop_end_the_gang_while_a_pod_is_lost() -> None:
    leader = running(3)
    leader.lose(1, 1)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.tick(1 + STOP_SECONDS)
    assert leader.order == StopRound(0)
    leader.tick(2 + STOP_SECONDS)
    assert leader.order == EndGang(), "node 2 is connected, and its ranks run"


def test_without_restarts_only_the_loss_of_a_pod_is_waited_for() -> None:
    leader = running(3, restarts=0)
    leader.receive(0, MemberState(FAILED, 0, LOST_PEER), 1)
    assert leader.order == StartRound(0)
    leader.receive(1, MemberState(FAILED, 0, cause()), 2)
    assert leader.order == EndGang()
    default = gang(3, restarts=0)
    run(default, 0, 3)
    default.receive(0, MemberState(FAILED, 0, LOST_PEER), 1)
    assert default.order == EndGang()


def test_the_others_succeed_again_with_the_new_pod() -> None:
    leader = running()
    leader.receive(0, MemberState(SUCCEEDED, 0), 1)
    leader.lose(1, 1)
    leader.tick(WAIT)
    assert leader.order == StartRound(0)
    leader.replace(1, WAIT)
    leader.receive(1, MemberState(READY, 0), WAIT)
    assert leader.order == StartRound(1)


def test_a_failed_round_waits_for_the_edit_beside_a_new_pod() -> None:
    leader = running()
    leader.announce(RoundCode(0), 3600, 0)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.receive(1, MemberState(READY, 0), 1)
    assert leader.order == StopRound(0, edit=True)
    leader.replace(1, 50)
    leader.receive(1, MemberState(READY, 0), 60)
    assert leader.order == StopRound(0, edit=True)
    leader.announce(RoundCode(1), 3600, 61)
    assert leader.order == StartRound(1, RoundCode(1))


def test_a_new_leader_stops_the_ranks_of_the_one_before_and_continues_its_rounds() -> None:
    leader = GangLeader(3, RestartPolicy(RestartLimits(3)), replace_seconds=WAIT)
    leader.receive(1, MemberState(READY, 4), 0)
    assert leader.order is None
    leader.receive(2, MemberState(RUNNING, 5), 0)
    assert leader.order == StopRound(5, lost=True), "before the gate is open"
    leader.receive(1, MemberState(READY, 5), 1)
    leader.receive(2, MemberState(READY, 5), 1)
    leader.receive(0, MemberState(), 2)
    assert leader.order == StopRound(5, lost=True), "the ranks of its own node may still run"
    leader.lose(1, 3)
    leader.open_gate(4, Predecessor(restarts=2, first_round=3))
    assert leader.order == OpenGate()
    leader.receive(1, MemberState(READY, 5), 5)
    assert leader.order == StartRound(6, restarts=2)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_new_leader_waits_for_a_node_that_it_never_hears_of_as_long_as_for_a_new_pod(
    is_open: bool,
) -> None:
    leader = GangLeader(3, RestartPolicy(RestartLimits(3)), replace_seconds=WAIT)
    leader.receive(1, MemberState(RUNNING, 5), 10)
    leader.receive(1, MemberState(READY, 5), 11)
    if is_open:
        leader.receive(0, MemberState(), 12)
        leader.open_gate(12)
    leader.tick(10 + WAIT)
    assert leader.order == (OpenGate() if is_open else StopRound(5, lost=True))
    leader.tick(11 + WAIT)
    assert leader.order == EndGang(), "the ranks of node 2 may run"


def test_the_first_leader_waits_for_its_nodes_without_a_limit() -> None:
    leader = GangLeader(2, RestartPolicy(RestartLimits(3)), replace_seconds=WAIT)
    leader.receive(0, MemberState(), 0)
    leader.open_gate(0)
    leader.tick(100 * WAIT)
    assert leader.order == OpenGate(), "a pod may wait for its node or its image"


def test_ranks_that_a_new_leader_cannot_stop_end_the_gang() -> None:
    leader = GangLeader(3, RestartPolicy(RestartLimits(3)), replace_seconds=WAIT)
    leader.receive(1, MemberState(RUNNING, 5), 10)
    leader.receive(1, MemberState(READY, 5), 11)
    leader.receive(2, MemberState(RUNNING, 5), 100)
    leader.tick(100 + STOP_SECONDS)
    assert leader.order == StopRound(5, lost=True), "node 2 has the order since its connection"
    leader.tick(101 + STOP_SECONDS)
    assert leader.order == EndGang()


def test_a_node_that_connects_again_has_the_time_to_stop() -> None:
    leader = running(3)
    leader.lose(1, 1)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.receive(2, MemberState(READY, 0), 2)
    leader.receive(1, MemberState(RUNNING, 0), 100)
    leader.tick(100 + STOP_SECONDS)
    assert leader.order == StopRound(0)
    leader.receive(1, MemberState(READY, 0), 100 + STOP_SECONDS)
    assert restarted(leader) == StartRound(1, restarts=1)


def test_a_new_pod_has_the_time_to_give_up_a_round_that_stopped_long_ago() -> None:
    leader = running()
    leader.receive(1, MemberState(LEAVING, 0), 1)
    leader.receive(0, MemberState(READY, 0), 2)
    leader.replace(1, 70)
    leader.receive(1, MemberState(), 71)
    assert leader.order == StopRound(0, lost=True)
    leader.receive(1, MemberState(READY, 0), 72)
    assert leader.order == StartRound(1)


def test_a_new_pod_has_the_time_even_if_the_lost_one_had_the_order() -> None:
    leader = running(3)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.receive(2, MemberState(READY, 0), 2)
    leader.replace(1, STOP_SECONDS)
    leader.receive(1, MemberState(), STOP_SECONDS)
    leader.tick(2 * STOP_SECONDS)
    assert leader.order == StopRound(0)
    leader.receive(1, MemberState(READY, 0), 2 * STOP_SECONDS)
    assert leader.order == StartRound(1)


def test_ranks_whose_node_connects_again_and_again_end_the_gang() -> None:
    leader = running(3)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.receive(2, MemberState(READY, 0), 1)
    for now in range(2, int(STOP_SECONDS)):
        leader.lose(1, now)
        leader.receive(1, MemberState(RUNNING, 0), now)
        assert leader.order == StopRound(0)
    leader.tick(2 + STOP_SECONDS)
    assert leader.order == EndGang()


def test_a_new_leader_starts_no_round_that_a_member_has_given_up() -> None:
    leader = GangLeader(2, RestartPolicy(RestartLimits(3)), replace_seconds=WAIT)
    leader.receive(1, MemberState(RUNNING, 5), 0)
    assert leader.order == StopRound(5, lost=True)
    leader.replace(1, 1)
    leader.receive(1, MemberState(), 2)
    leader.receive(0, MemberState(), 2)
    leader.open_gate(2)
    assert leader.order == StartRound(6), "the new pod has the order to give up round 5"


def fail(leader: GangLeader, member: GangMember, code: int = 1) -> None:
    """The ranks of the present round fail on node 0, those of node 1 are stopped."""
    order = leader.order
    assert isinstance(order, StartRound)
    assert member.follow(decode_order(encode_order(order)))
    run(leader, order.round)
    leader.receive(0, MemberState(FAILED, order.round, cause(code=code), step=7), 1)
    member.end(None, None, stopped=True)
    leader.receive(1, decode_state(encode_state(member.state)), 1)


def lead_again(member: GangMember, restarts: int, predecessor: Predecessor) -> GangLeader:
    """A new leader that a member has reported to."""
    leader = GangLeader(2, RestartPolicy(RestartLimits(restarts)), replace_seconds=WAIT)
    leader.receive(1, decode_state(encode_state(member.state)), 2)
    leader.receive(0, MemberState(), 2)
    leader.open_gate(2, predecessor)
    for index in range(2):
        leader.receive(index, member.state._replace(state=READY), 2)
    return leader


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_new_leader_continues_the_count_of_restarts(known: int) -> None:
    """The controller may not have the last report of the leader before."""
    leader, member = gang(2, 3, WAIT), GangMember()
    for code in (1, 2):
        fail(leader, member, code)
    assert member.follow(leader.order)
    new = lead_again(member, 3, Predecessor(restarts=known, first_round=known))
    assert restarted(new) == StartRound(3, restarts=2)
    fail(new, member, 3)
    assert new.restarts().total == 3
    fail(new, member, 4)
    assert new.order == EndGang(), "the controller permits three restarts"


def test_a_new_leader_continues_the_count_of_failures_of_one_kind() -> None:
    leader, member = gang(2, 9, WAIT), GangMember()
    fail(leader, member)
    fail(leader, member)
    assert member.follow(leader.order)
    new = lead_again(member, 9, Predecessor())
    fail(new, member)
    assert new.order == EndGang(), "the third failure of one kind without a newer step"
