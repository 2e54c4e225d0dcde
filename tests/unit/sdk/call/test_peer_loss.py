"""A rank that lost its peer: the call waits for the cause, or for the next gang."""

import pytest

from torchrun_api.contract.peer_loss import PEER_LOSS
from torchrun_controller.reconcile.gang.failures import PEER_WAIT
from torchrun_sdk import errors
from torchrun_sdk.call import peer_loss
from torchrun_sdk.call.state import CallState, Wait
from torchrun_sdk.spec import RAISED, Exited, Raised, Result

from .test_state import LIMITS, call_state, raised, result, started

LOST = "[gloo] Connection closed by peer [10.0.0.1]:2000"


def lost(rank: int) -> Raised:
    return raised(rank, 10.0, "builtins.RuntimeError")._replace(text=LOST)


def running(*frames: Raised) -> CallState:
    call = call_state()
    for rank in (0, 1):
        call.add_frame(0, started(rank), 1)
    for frame in frames:
        call.add_frame(0, frame, 10)
    return call


def test_the_patterns_are_those_of_the_api() -> None:
    assert peer_loss.PATTERNS == PEER_LOSS


def test_the_wait_is_longer_than_that_of_the_controller() -> None:
    assert PEER_WAIT.total_seconds() + 3 < peer_loss.PEER_WAIT


@pytest.mark.parametrize("phase", ["Queued", "Preempted", "Suspended", "Pending"])
def test_the_next_gang_replaces_a_lost_peer(phase: str) -> None:
    call = running(lost(1))
    assert isinstance(call.decide(11.5), Wait)
    call.job_changed({"phase": phase, "attempt": 0}, 12)
    assert isinstance(call.decide(40), Wait)  # the back-off
    call.job_changed({"phase": "Running", "attempt": 1}, 41)
    for rank in (0, 1):
        call.add_frame(1, started(rank), 42)
        call.add_frame(1, result(rank), 43)
    call.job_changed({"phase": "Succeeded", "attempt": 1}, 44)
    assert len(call.decide(44)) == 2


def test_the_wait_for_the_next_gang_has_the_limits_of_the_call() -> None:
    call = running(lost(1))
    call.job_changed({"phase": "Queued", "attempt": 0}, 12)
    assert isinstance(call.decide(51), errors.CallTimeout)


@pytest.mark.parametrize("other", [lost(0), result(0)])
def test_there_is_no_wait_when_no_rank_runs(other: Raised | Result) -> None:
    """For example a database that is not reachable."""
    call = running(lost(1))
    assert isinstance(call.decide(11.5), Wait)
    call.add_frame(0, other, 12)
    assert isinstance(call.decide(12), errors.RemoteException)


@pytest.mark.parametrize(("limit", "end"), [(12.0, 13.0), (9.5, 11.0), (None, 25.0)])
def test_the_wait_for_a_cause_has_the_limit_of_the_call(limit: float | None, end: float) -> None:
    call = CallState("job", LIMITS._replace(call=limit), 0.0)
    for rank in (0, 1):
        call.add_frame(0, started(rank), 1)
    call.add_frame(0, lost(1), 10)
    assert call.decide(10.5) == Wait(end - 10.5)
    assert isinstance(call.decide(end), errors.RemoteException)


@pytest.mark.parametrize("phase", ["Running", "Queued"])
def test_a_loss_without_a_cause_is_the_error_after_the_wait(phase: str) -> None:
    """A gang that has never run completely is in phase Queued."""
    call = CallState("job", LIMITS, 0.0)
    call.job_changed({"phase": phase, "attempt": 0}, 0.0)
    call.add_frame(0, started(0), 1)
    call.add_frame(0, lost(0), 10)
    assert call.decide(11) == Wait(peer_loss.PEER_WAIT - 1)
    assert isinstance(call.decide(10 + peer_loss.PEER_WAIT), errors.RemoteException)


def test_the_only_rank_has_no_peer() -> None:
    call = call_state()
    call.add_frame(0, started(0, 1), 1)
    call.add_frame(0, lost(0), 10)
    assert isinstance(call.decide(11), errors.RemoteException)


@pytest.mark.parametrize(
    "cause", [raised(0, 12.0)._replace(age=0.0), Exited(0, "node-0", 12.0, 137)]
)
def test_a_cause_that_arrives_late_is_the_error(cause: Raised | Exited) -> None:
    call = running(lost(1))
    call.add_frame(0, cause, 12)
    error = call.decide(12.5)
    assert isinstance(error, errors.CallError)
    assert error.rank == 0


@pytest.mark.parametrize(
    ("last", "kind", "rank"),
    [
        ({"rank": 0, "exitCode": 137, "signal": 9}, errors.RankExited, 0),
        ({"reason": "Evicted", "node": "n"}, errors.Evicted, None),
        ({"rank": 1, "exitCode": RAISED}, errors.RemoteException, 1),
        ({"exitCode": RAISED}, errors.RemoteException, 1),
        ({}, errors.RemoteException, 1),
    ],
)
@pytest.mark.parametrize("from_storage", [False, True])
def test_the_cause_that_the_job_names_is_the_error(
    last: dict, kind: type, rank: int | None, from_storage: bool
) -> None:
    call = CallState("job", LIMITS, 0.0, from_storage=from_storage)
    for each in (0, 1):
        call.add_frame(0, started(each), 1)
    call.add_frame(0, lost(1), 10)
    call.job_changed({"phase": "Failed", "lastFailure": last}, 12)
    assert isinstance(call.decide(12), Wait)
    error = call.decide(15)
    assert type(error) is kind
    assert isinstance(error, errors.CallError)
    assert error.rank == rank


def test_a_lost_peer_of_a_deleted_job_is_not_the_cause() -> None:
    call = running(lost(1))
    call.job_deleted(10.5)
    error = call.decide(13.5)
    assert isinstance(error, errors.JobFailed)
    assert error.reason == "Deleted"
