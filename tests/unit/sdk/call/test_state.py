"""The outcome of a call for each sequence of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_api.kinds.status import TERMINAL
from torchrun_sdk import errors
from torchrun_sdk.call.state import CallLimits, CallState, Wait
from torchrun_sdk.cluster.manifest import TERMINAL_PHASES
from torchrun_sdk.serialization import Packed
from torchrun_sdk.spec import RAISED, Raised, Removed, Result, Started

LIMITS = CallLimits(launch=100, quorum=20, call=50)


def test_the_phases_that_a_job_does_not_leave_are_those_of_the_api() -> None:
    assert set(TERMINAL_PHASES) == TERMINAL


def started(rank: int, world: int = 2, time: float = 0.0) -> Started:
    return Started(rank, world, f"node-{rank}", 1, time)


def result(rank: int) -> Result:
    return Result(rank, f"node-{rank}", Packed("json", "3.11", str(rank)))


def raised(rank: int, time: float, type: str = "builtins.ValueError") -> Raised:
    return Raised(rank, f"node-{rank}", time, type, "bad", "Traceback ...")


def call_state(*, stays: bool = False, attempt: int = 0) -> CallState:
    made = CallState("job", LIMITS, 0.0, stays=stays)
    made.job_changed({"phase": "Running", "attempt": attempt}, 0.0)
    return made


def test_all_results_and_the_end_of_the_job_are_a_success() -> None:
    call = call_state()
    for rank in (1, 0):
        call.add_frame(0, started(rank), 1)
        call.add_frame(0, result(rank), 2)
    assert isinstance(call.decide(2), Wait)
    call.job_changed({"phase": "Succeeded"}, 3)
    assert [found.rank for found in call.decide(3)] == [0, 1]


def test_warm_pods_are_not_waited_for() -> None:
    call = call_state(stays=True)
    for rank in (0, 1):
        call.add_frame(0, started(rank), 1)
        call.add_frame(0, result(rank), 2)
    assert len(call.decide(2)) == 2


def test_a_result_that_a_later_call_has_removed_is_an_error() -> None:
    call = call_state(stays=True)
    call.add_frame(0, started(0), 1)
    call.add_frame(0, started(1), 1)
    call.add_frame(0, result(0), 2)
    call.add_frame(0, Removed(0), 3)
    assert isinstance(call.decide(3), Wait), "the client has it"
    call.add_frame(0, Removed(1), 3)
    error = call.decide(3)
    assert isinstance(error, errors.CallError)
    assert (error.job, error.rank) == ("job", 1)
    assert "a later call has removed it" in str(error)


def test_a_missing_rank_is_no_success() -> None:
    call = call_state()
    call.add_frame(0, started(0), 1)
    call.add_frame(0, result(0), 2)
    call.job_changed({"phase": "Succeeded"}, 3)
    assert isinstance(call.decide(3), Wait)
    error = call.decide(7)
    assert isinstance(error, errors.JobFailed)
    assert error.reason == "ResultsMissing"


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 5.0])
def test_the_first_exception_counts_with_any_clock_skew(ahead: float) -> None:
    call = call_state()
    # Node 1 was 1.3 s earlier, but its connection is slower.
    call.add_frame(0, raised(0, 101.3, "torch.DistBackendError")._replace(age=0.1), 1)
    call.add_frame(0, raised(1, 100.0 + ahead)._replace(age=1.9), 1.5)
    assert isinstance(call.decide(1.5), Wait)
    error = call.decide(2)
    assert isinstance(error, errors.RemoteException)
    assert (error.type, error.rank, error.node) == ("builtins.ValueError", 1, "node-1")
    assert "ValueError: bad (rank 1 on node-1)" in str(error)


def test_events_before_the_status_keep_their_time() -> None:
    call = call_state()
    call.add_frame(1, raised(1, 50.0), 1)
    call.add_frame(1, raised(0, 10.0, "torch.DistBackendError"), 2)
    call.job_changed({"phase": "Running", "attempt": 1}, 9)
    error = call.decide(10)
    assert isinstance(error, errors.RemoteException)
    assert error.rank == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), st.permutations([0, 1, 2]))
def test_clocks_of_nodes_do_not_decide(skews: list[float], order: list[int]) -> None:
    call = call_state()
    for place, rank in enumerate(order):
        ago = (
            3 - rank
        ) + place * 0.01  # rank 0 raised first, and all messages arrive at the same time
        call.add_frame(0, raised(rank, 100 + rank + skews[rank])._replace(age=ago), place * 0.01)
    error = call.decide(5)
    assert isinstance(error, errors.RemoteException)
    assert error.rank == 0


@pytest.mark.parametrize(("cause", "rank"), [({"rank": 1}, 1), ({}, 2), ({"rank": 7}, 2)])
def test_past_failures_use_the_controllers_cause_or_the_running_time(
    cause: dict, rank: int
) -> None:
    call = CallState("job", LIMITS, 0.0, from_storage=True)
    call.job_changed({"phase": "Failed", "lastFailure": cause}, 0.0)
    for number, (time, elapsed) in enumerate([(1.0, 9.0), (3.0, 8.0), (2.0, 7.0)]):
        call.add_frame(0, raised(number, time)._replace(elapsed=elapsed), 0.0)
    error = call.decide(1e6)
    assert isinstance(error, errors.RemoteException)
    assert error.rank == rank


def test_a_restarted_rank_on_a_slow_clock_has_no_result() -> None:
    call = call_state(stays=True)
    call.add_frame(0, started(0, time=500), 1)
    call.add_frame(0, result(0), 2)
    call.add_frame(0, started(0, time=3)._replace(node="node-9"), 3)
    call.add_frame(0, started(1, time=3), 3)
    call.add_frame(0, result(1), 4)
    assert isinstance(call.decide(4), Wait)


def test_a_new_attempt_clears_the_results() -> None:
    call = call_state()
    call.add_frame(0, started(0), 1)
    call.add_frame(0, result(0), 1)
    call.add_frame(0, raised(1, 1.0), 1)
    call.job_changed({"phase": "Running", "attempt": 1}, 1.1)
    call.add_frame(0, started(1), 1.2)  # a late message of the first gang
    assert call.decide(2) == Wait(100 - 0.9)
    for rank in (0, 1):
        call.add_frame(1, started(rank), 3)
        call.add_frame(1, result(rank), 3)
    call.job_changed({"phase": "Succeeded", "attempt": 1}, 4)
    assert len(call.decide(4)) == 2


def test_ranks_that_torchrun_restarts_have_no_result() -> None:
    call = call_state(stays=True)
    call.add_frame(0, started(0, time=1), 1)
    call.add_frame(0, result(0), 2)
    call.add_frame(0, started(0, time=3), 3)
    call.add_frame(0, started(1, time=3), 3)
    call.add_frame(0, result(1), 4)
    assert isinstance(call.decide(4), Wait)


def test_ranks_that_torchrun_restarts_have_raised_nothing() -> None:
    call = call_state()
    call.add_frame(0, started(0, 1, time=1), 1)
    call.add_frame(0, raised(0, 2.0), 2)
    call.add_frame(0, started(0, 1, time=3), 2.5)
    assert isinstance(call.decide(4), Wait)
    call.add_frame(0, raised(0, 9.0), 9)
    assert call.decide(9) == Wait(1)


def test_a_restarted_rank_has_no_result_after_the_results_of_all() -> None:
    call = call_state(stays=True)
    call.add_frame(0, started(0, 1, time=1), 1)
    call.add_frame(0, result(0), 2)
    call.add_frame(0, started(0, 1, time=3), 3)
    assert isinstance(call.decide(3), Wait)


@pytest.mark.parametrize(
    ("heard", "at", "kind"),
    [
        ([], 100, errors.LaunchTimeout),
        ([started(0)], 21, errors.QuorumTimeout),
        ([started(0), started(1), result(0)], 51, errors.CallTimeout),
    ],
)
def test_every_wait_is_bounded(heard: list, at: float, kind: type) -> None:
    call = call_state()
    for frame in heard:
        call.add_frame(0, frame, 1)
    waits = call.decide(at - 0.5)
    assert waits == Wait(0.5)
    error = call.decide(at)
    assert isinstance(error, kind)
    assert isinstance(error, TimeoutError)


@pytest.mark.parametrize(
    ("last", "kind", "code"),
    [
        ({"reason": "Exit", "exitCode": 9, "rank": 1, "node": "n"}, errors.RankExited, 9),
        ({"reason": "OOMKilled", "exitCode": 137, "signal": 9}, errors.OutOfMemory, 137),
        ({"reason": "Evicted", "node": "n"}, errors.Evicted, None),
        ({"reason": "Exception", "exitCode": RAISED}, errors.JobFailed, None),
        ({}, errors.JobFailed, None),
    ],
)
def test_the_end_of_a_job_without_results(last: dict, kind: type, code: object) -> None:
    call = call_state()
    call.job_changed({"phase": "Failed", "reason": "X", "message": "why", "lastFailure": last}, 5)
    assert isinstance(call.decide(5), Wait)
    error = call.decide(8)
    assert type(error) is kind
    assert getattr(error, "exit_code", None) == code


def test_a_job_that_is_deleted() -> None:
    call = call_state()
    call.job_deleted(5)
    error = call.decide(8)
    assert isinstance(error, errors.JobFailed)
    assert error.reason == "Deleted"


def test_results_of_another_python() -> None:
    call = call_state()
    call.add_frame(0, raised(0, 1.0)._replace(incompatible=True, text="pickled by 3.9"), 1)
    assert isinstance(call.decide(2), errors.IncompatiblePython)


@pytest.mark.parametrize(
    ("base", "caught"),
    [
        ("ValueError", ValueError),
        ("KeyError", LookupError),
        ("FileNotFoundError", OSError),
        ("UnicodeDecodeError", ValueError),
        ("SyntaxError", SyntaxError),
        ("ExceptionGroup", errors.RemoteException),
        ("StopIteration", errors.RemoteException),
        ("SystemExit", errors.RemoteException),
        ("KeyboardInterrupt", errors.RemoteException),
        ("print", errors.RemoteException),
        ("", errors.RemoteException),
    ],
)
def test_an_exception_of_the_function_is_caught_as_its_built_in_class(
    base: str, caught: type[Exception]
) -> None:
    call = call_state()
    call.add_frame(0, raised(0, 1.0, "mine.Error")._replace(base=base), 1)
    error = call.decide(5)
    assert isinstance(error, errors.RemoteException)
    assert isinstance(error, caught)
    assert str(error).startswith("mine.Error: bad (rank 0 on node-0)")
    only_sdk = (errors.SdkError, Exception, BaseException, object)
    assert caught is not errors.RemoteException or type(error).__mro__[-4:] == only_sdk
