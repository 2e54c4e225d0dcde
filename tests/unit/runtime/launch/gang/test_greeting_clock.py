"""Nodes whose clocks differ: the leader compares the times of causes by its own clock."""

import time
from contextlib import ExitStack

import pytest

from ports import free_port
from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang import connection
from torchrun_runtime.launch.gang.connection import LeaderConnection
from torchrun_runtime.launch.gang.greeting import skew_of, with_time_of_leader
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.messages import MemberState, StartRound, StopRound
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from torchrun_runtime.launch.gang.rounds import OrderInbox
from torchrun_runtime.launch.gang.server import GangServer
from torchrun_runtime.launch.output import timestamp
from unit.runtime.launch.gang.test_connection import await_order


@pytest.mark.parametrize(
    ("claimed", "skew"),
    [
        (100.5, 0.0),  # between the two times, so it may be right
        (161.0, 60.0),
        (40, -60.0),
        (None, 0.0),
        ("100", 0.0),
        (float("nan"), 0.0),
        (float("inf"), 0.0),
        (10**400, 0.0),
    ],
)
def test_only_a_difference_that_is_certain_counts(claimed: object, skew: float) -> None:
    assert skew_of(claimed, 100.0, 101.0) == skew


def failed(moment: str) -> MemberState:
    return MemberState("failed", 0, Cause(1, 0, None, "Exception", "ValueError: no", moment))


def test_the_time_of_a_cause_is_that_of_the_leader() -> None:
    state = failed("2026-01-01T00:01:00.250000Z")
    assert with_time_of_leader(state, 60.0) == failed("2026-01-01T00:00:00.250000Z")
    assert with_time_of_leader(state, -60.0) == failed("2026-01-01T00:02:00.250000Z")


@pytest.mark.parametrize("moment", ["", "2026-01-01", "0001-01-01T00:00:00.000000Z"])
def test_a_time_that_cannot_be_corrected_stays(moment: str) -> None:
    assert with_time_of_leader(failed(moment), 60.0) == failed(moment)
    assert with_time_of_leader(failed(moment), 1e300) == failed(moment)
    assert with_time_of_leader(MemberState(), 60.0) == MemberState()


@pytest.mark.parametrize("ahead", [600.0, -600.0])
def test_the_first_cause_is_found_although_the_clocks_of_nodes_differ(
    monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """A rank of node 0 and one of node 1 fail, a minute apart."""
    monkeypatch.setattr(connection, "wall_time", lambda: time.time() + ahead)
    port, inbox = free_port(), OrderInbox()
    leader = GangLeader(2, RestartPolicy(RestartLimits(3)))
    server = GangServer(port, 2, "uid 1", leader, lambda _: None)
    with ExitStack() as stack:
        stack.callback(server.close)
        member = LeaderConnection("127.0.0.1", port, 1, "uid 1", inbox)
        stack.callback(member.close)
        server.call(lambda state, now: state.receive(0, MemberState(), now))
        server.call(GangLeader.open_gate)
        await_order(inbox, StartRound(0))
        now, first = time.time(), 1 if ahead > 0 else 0
        times = (now - 60, now) if first == 0 else (now, now - 60)
        server.call(lambda state, at: state.receive(0, MemberState("running", 0), at))
        member.report(failed(timestamp(times[1] + ahead)))
        await_order(inbox, StopRound(0))
        server.call(lambda state, at: state.receive(0, failed(timestamp(times[0])), at))
        while not isinstance(inbox.order, StartRound):
            inbox.wait(inbox.order, 1)
        assert leader.restarts().last[0].node == first
