"""The leader starts a round only when no rank of the round before runs, and ends the gang in doubt."""

from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang.leader import (
    LOST_SECONDS,
    PEER_SECONDS,
    STOP_SECONDS,
    GangLeader,
    Predecessor,
    Restarts,
    TransportUse,
)
from torchrun_runtime.launch.gang.messages import (
    ALONE,
    FAILED,
    LEAVING,
    READY,
    RUNNING,
    SUCCEEDED,
    TOGETHER,
    EndGang,
    MemberState,
    NcclTransport,
    OpenGate,
    RoundCode,
    StartRound,
    StopRound,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy

TIME = "2026-01-01T00:00:00.000000Z"


def cause(message: str = "ValueError: no", code: int = 1, reason: str = "Exception") -> Cause:
    return Cause(code, 0, None, reason, message, TIME)


LOST_PEER = cause("RuntimeError: Connection closed by peer")


def gang(size: int = 2, restarts: int = 3) -> GangLeader:
    """A gang of which all members are ready, with an open gate: round 0 has started."""
    leader = GangLeader(size, RestartPolicy(RestartLimits(restarts)))
    for index in range(size):
        leader.receive(index, MemberState(), 0)
    leader.open_gate(0)
    assert leader.order == StartRound(0)
    return leader


def run(leader: GangLeader, number: int, size: int = 2) -> None:
    for index in range(size):
        leader.receive(index, MemberState(RUNNING, number), 0)


def test_the_first_round_waits_for_the_gate_and_for_every_member() -> None:
    leader = GangLeader(2, RestartPolicy(RestartLimits()))
    leader.receive(0, MemberState(), 0)
    assert leader.order is None
    leader.open_gate(0)
    assert leader.order == OpenGate()
    leader.receive(1, MemberState(), 0)
    assert leader.order == StartRound(0)
    closed = GangLeader(1, RestartPolicy(RestartLimits()))
    closed.receive(0, MemberState(), 0)
    assert closed.order is None


def test_a_pod_that_leaves_before_the_start_ends_the_gang_also_once_the_gate_is_open() -> None:
    leader = GangLeader(2, RestartPolicy(RestartLimits()))
    leader.receive(0, MemberState(), 0)
    leader.open_gate(0)
    leader.receive(1, MemberState(LEAVING), 1)
    assert isinstance(leader.order, EndGang)


def test_a_failed_round_is_followed_by_another_once_all_ranks_are_dead() -> None:
    leader = gang()
    run(leader, 0)
    leader.receive(1, MemberState(FAILED, 0, cause()), 1)
    assert leader.order == StopRound(0, failed=True)
    leader.receive(0, MemberState(READY, 0, step=70), 2)
    assert leader.order == StartRound(1, restarts=1)
    assert [(failed.cause, failed.step) for failed in leader.restarts().last] == [(cause(), 70)]


def test_a_new_pod_of_node_0_continues_the_count_and_the_rounds() -> None:
    leader = GangLeader(1, RestartPolicy(RestartLimits(3)))
    leader.receive(0, MemberState(), 0)
    leader.open_gate(0, Predecessor(restarts=2, first_round=4))
    assert leader.order == StartRound(4, restarts=2)
    assert leader.restarts() == Restarts(2)
    leader.receive(0, MemberState(FAILED, 4, cause()), 1)
    assert leader.order == StartRound(5, restarts=3)
    assert leader.restarts().total == 3
    leader.receive(0, MemberState(FAILED, 5, cause("KeyError: 'x'", 2)), 2)
    assert leader.order == EndGang()


def test_a_member_that_never_started_the_round_must_give_it_up_first() -> None:
    leader = gang()
    leader.receive(1, MemberState(RUNNING, 0), 0)
    leader.receive(1, MemberState(FAILED, 0, cause()), 1)
    assert leader.order == StopRound(0), "member 0 is ready, but may start round 0 yet"
    leader.receive(0, MemberState(READY, 0), 2)
    assert leader.order == StartRound(1, restarts=1)


def test_all_members_succeed_before_the_gang_ends() -> None:
    leader = gang()
    run(leader, 0)
    leader.receive(0, MemberState(SUCCEEDED, 0), 1)
    assert leader.order == StartRound(0)
    leader.lose(0, 2)
    leader.receive(1, MemberState(SUCCEEDED, 0), 3)
    assert leader.order == EndGang()


def test_a_failure_after_a_success_restarts_both() -> None:
    leader = gang()
    run(leader, 0)
    leader.receive(0, MemberState(SUCCEEDED, 0), 1)
    leader.receive(1, MemberState(FAILED, 0, cause()), 1)
    assert leader.order == StartRound(1, restarts=1)


def test_a_lost_peer_waits_for_the_cause() -> None:
    leader = gang(3)
    run(leader, 0, 3)
    leader.receive(1, MemberState(FAILED, 0, LOST_PEER), 1)
    assert leader.order == StartRound(0)
    leader.receive(2, MemberState(FAILED, 0, cause("KeyError: 'x'")), 2)
    assert leader.order == StopRound(0)
    leader.receive(0, MemberState(READY, 0), 2)
    assert leader.restarts().last[0].cause.message == "KeyError: 'x'"


def test_a_lost_peer_does_not_wait_for_ever() -> None:
    leader = gang(3)
    run(leader, 0, 3)
    leader.receive(1, MemberState(FAILED, 0, LOST_PEER), 1)
    leader.tick(1 + PEER_SECONDS - 0.1)
    assert leader.order == StartRound(0)
    leader.tick(1 + PEER_SECONDS)
    assert leader.order == StopRound(0)


def test_a_pod_that_leaves_ends_the_gang_and_disturbs_no_rank() -> None:
    leader = gang()
    run(leader, 0)
    leader.receive(1, MemberState(LEAVING, 0), 1)
    assert leader.order == EndGang()
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    assert leader.order == EndGang()


def test_without_restarts_the_other_nodes_go_on_until_kubernetes_ends_them() -> None:
    leader = gang(restarts=0)
    run(leader, 0)
    leader.receive(1, MemberState(FAILED, 0, cause()), 1)
    assert leader.order == EndGang()


def test_the_restarts_are_limited() -> None:
    restarts = 2
    leader = gang(1, restarts)
    for number in range(restarts):
        leader.receive(0, MemberState(FAILED, number, cause(code=number + 1)), 10**number)
        assert leader.order == StartRound(number + 1, restarts=number + 1)
    leader.receive(0, MemberState(FAILED, restarts, cause()), 10**restarts)
    assert leader.order == EndGang()


def test_newer_code_is_no_restart() -> None:
    leader = gang(restarts=0)
    run(leader, 0)
    leader.announce(RoundCode(2), 0, 1)
    assert leader.order == StopRound(0, failed=False)
    leader.receive(0, MemberState(READY, 0), 1)
    leader.receive(1, MemberState(FAILED, 0, cause()), 1)
    assert leader.order == StartRound(1, RoundCode(2))
    assert leader.restarts().last == ()


def test_a_failed_round_waits_for_an_edit_in_development() -> None:
    leader = gang(1)
    leader.announce(RoundCode(1), 60, 0)
    leader.receive(0, MemberState(READY, 0), 0)
    assert leader.order == StartRound(1, RoundCode(1))
    leader.receive(0, MemberState(FAILED, 1, cause()), 10)
    leader.tick(69)
    assert leader.order == StopRound(1, edit=True)
    leader.announce(RoundCode(2), 60, 69)
    assert leader.order == StartRound(2, RoundCode(2))
    leader.receive(0, MemberState(FAILED, 2, cause()), 100)
    leader.tick(160)
    assert leader.order == EndGang()


def test_a_member_that_is_gone_ends_the_gang_when_the_others_wait_for_it() -> None:
    leader = gang()
    run(leader, 0)
    leader.lose(1, 1)
    leader.tick(1000)
    assert leader.order == StartRound(0), "its ranks run without the connection"
    leader.receive(0, MemberState(FAILED, 0, cause()), 1000)
    assert leader.order == EndGang()


def test_a_member_that_returns_is_waited_for() -> None:
    leader = gang()
    run(leader, 0)
    leader.lose(1, 100)
    leader.receive(0, MemberState(FAILED, 0, cause()), 101)
    leader.tick(100 + LOST_SECONDS)
    assert leader.order == StopRound(0)
    leader.receive(1, MemberState(RUNNING, 0), 116)
    leader.tick(120)
    assert leader.order == StopRound(0), "it is connected, and ends its ranks"
    leader.receive(1, MemberState(READY, 0), 121)
    assert leader.order == StartRound(1, restarts=1)


def test_no_round_starts_without_a_connection_to_every_member() -> None:
    leader = gang()
    run(leader, 0)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.receive(1, MemberState(READY, 0), 1)
    assert leader.order == StartRound(1, restarts=1)
    run(leader, 1)
    leader.receive(0, MemberState(FAILED, 1, cause(code=2)), 2)
    leader.lose(1, 2)
    leader.receive(0, MemberState(FAILED, 1, cause(code=2)), 2)
    assert leader.order == StopRound(1)
    leader.tick(2 + LOST_SECONDS + 1)
    assert leader.order == EndGang()


def test_a_gang_with_a_head_ends_with_the_head() -> None:
    leader = GangLeader(2, RestartPolicy(RestartLimits(3)), is_head=True)
    for index in range(2):
        leader.receive(index, MemberState(), 0)
    leader.open_gate(0)
    run(leader, 0)
    leader.receive(1, MemberState(SUCCEEDED, 0), 1)
    assert leader.order == StartRound(0)
    leader.receive(1, MemberState(RUNNING, 0), 1)
    leader.receive(0, MemberState(SUCCEEDED, 0), 1)
    assert leader.order == EndGang()


def test_a_node_that_does_not_stop_ends_the_gang() -> None:
    leader = gang()
    run(leader, 0)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.tick(1 + STOP_SECONDS)
    assert leader.order == StopRound(0)
    leader.tick(2 + STOP_SECONDS)
    assert leader.order == EndGang()


def test_a_node_that_succeeded_without_a_connection_is_not_waited_for() -> None:
    leader = gang()
    run(leader, 0)
    leader.lose(1, 1)
    leader.receive(0, MemberState(SUCCEEDED, 0), 2)
    leader.tick(1 + LOST_SECONDS)
    assert leader.order == StartRound(0)
    leader.tick(2 + LOST_SECONDS)
    assert leader.order == EndGang()


def test_a_node_that_runs_without_a_connection_is_waited_for_by_nodes_that_run() -> None:
    leader = gang()
    run(leader, 0)
    leader.lose(1, 1)
    leader.tick(10_000)
    assert leader.order == StartRound(0)


def test_a_short_loss_of_a_connection_does_not_end_the_wait_for_an_edit() -> None:
    leader = gang(restarts=0)
    leader.announce(RoundCode(0), 3600, 0)
    run(leader, 0)
    leader.receive(0, MemberState(FAILED, 0, cause()), 1)
    leader.receive(1, MemberState(READY, 0), 1)
    assert leader.order == StopRound(0, edit=True)
    leader.lose(1, 100)
    leader.tick(101)
    leader.receive(1, MemberState(READY, 0), 102)
    assert leader.order == StopRound(0, edit=True)


def test_the_others_wait_for_a_node_that_missed_the_start() -> None:
    leader = gang(size=3)
    for index in (0, 1):
        leader.receive(index, MemberState(RUNNING, 0), 0)
    leader.lose(2, 1)
    for index in (0, 1):
        leader.receive(index, MemberState(SUCCEEDED, 0), 2)
    leader.tick(1 + 10 * LOST_SECONDS)
    assert leader.order == StartRound(0)
    leader.receive(2, MemberState(), 2 + 10 * LOST_SECONDS)
    assert leader.order == StartRound(0)


def test_workers_that_fail_after_their_head_has_succeeded_start_no_round() -> None:
    leader = GangLeader(2, RestartPolicy(RestartLimits(3)), is_head=True)
    for index in range(2):
        leader.receive(index, MemberState(), 0)
    leader.open_gate(0)
    run(leader, 0)
    leader.receive(1, MemberState(FAILED, 0, LOST_PEER), 1)
    assert leader.order == StartRound(0), "the cause may be the end of the head"
    leader.receive(0, MemberState(SUCCEEDED, 0), 2)
    assert leader.order == EndGang()


def test_a_gang_trains_alone_unless_a_process_of_any_node_has_a_group() -> None:
    leader = gang(3)
    run(leader, 0, 3)
    assert not leader.trains_alone()
    leader.receive(0, MemberState(RUNNING, 0, training=ALONE), 1)
    assert leader.trains_alone()
    leader.receive(2, MemberState(SUCCEEDED, 0, training=TOGETHER), 2)
    assert not leader.trains_alone()


def test_the_networks_of_a_round_are_counted_and_forgotten_by_the_next_one() -> None:
    leader, socket, ib = gang(3), NcclTransport("Socket", "eth0"), NcclTransport("IB")
    for index, transport in enumerate((socket, ib, ib)):
        leader.receive(index, MemberState(RUNNING, 0, transport=transport), 0)
    assert leader.networks() == (TransportUse(ib, 2, 1), TransportUse(socket, 1, 0))
    run(leader, 1, 3)
    assert leader.networks() == ()


def test_a_round_that_fails_because_of_leftovers_ends_the_gang_with_the_cause_before() -> None:
    leader = gang()
    first, second = cause("OSError: no answer"), cause("FileExistsError: out")
    for number, failed, seconds in ((0, first, 9), (1, second, 1)):
        run(leader, number)
        start = 10 * (number + 1)
        leader.receive(1, MemberState(FAILED, number, failed), start + seconds)
        leader.receive(0, MemberState(READY, number), start + seconds)
    assert leader.order == EndGang(node=1, cause=first)


def test_all_nodes_hear_of_a_debugger_while_it_is_attached_to_one() -> None:
    leader = gang()
    run(leader, 0)
    leader.receive(1, MemberState(RUNNING, 0, is_debugged=True), 7)
    assert leader.order == StartRound(0, is_debugged=True)
    leader.lose(1, 8)
    leader.tick(8)
    assert leader.order == StartRound(0), "a node without a connection keeps no watch from ending"
    leader.receive(1, MemberState(RUNNING, 0, is_debugged=True), 9)
    leader.receive(1, MemberState(RUNNING, 0), 10)
    assert leader.order == StartRound(0)
    leader.receive(1, MemberState(FAILED, 0, cause()), 20)
    leader.receive(0, MemberState(READY, 0), 20)
    assert leader.restarts().last[0].seconds == 20, "the round has started only once"
