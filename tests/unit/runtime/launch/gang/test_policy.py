"""Restarts in place stay within the limits of the controller."""

import pytest

from torchrun_runtime.launch.cause import Cause, LaunchError
from torchrun_runtime.launch.gang.policy import (
    RestartLimits,
    RestartPolicy,
    RoundFailure,
    Verdict,
    read_limits,
)

TIME = "2026-01-01T00:00:00.000000Z"


def failure(code: int = 1, reason: str = "Exception", signal: "int | None" = None) -> Cause:
    return Cause(code, 0, signal, reason, "no", TIME)


def allows(
    policy: RestartPolicy, cause: Cause, step: "int | None", seconds: float, restarts: int
) -> bool:
    return policy.judge(RoundFailure(cause, seconds, step), restarts).restart


def test_a_third_failure_of_one_kind_without_a_newer_step_is_not_allowed() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert [allows(policy, failure(), 5, 1, 0) for _ in range(3)] == [True, True, False]


def test_a_newer_step_counts_as_progress() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert all(allows(policy, failure(), step, 1, 0) for step in (5, 6, 7, 8))
    assert [allows(policy, failure(), 8, 1, 0) for _ in range(2)] == [True, False]


def test_a_round_without_steps_that_lasted_counts_as_progress() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert all(allows(policy, failure(), None, 600, 0) for _ in range(5))


def test_failures_of_different_kinds_are_counted_apart() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert all(allows(policy, failure(code), None, 1, 0) for code in (1, 2, 1, 2, 1))


@pytest.mark.parametrize("reason", ["OOMKilled", "Fenced", "Stopped", "LaunchFailed"])
def test_other_failures_need_a_new_gang(reason: str) -> None:
    assert not allows(RestartPolicy(RestartLimits(9)), failure(reason=reason), None, 1, 0)


def test_exit_codes_and_signals_of_rules_are_left_to_the_controller() -> None:
    limits = read_limits('{"restarts": 9, "exitCodes": [42], "signals": [9]}')
    assert not allows(RestartPolicy(limits), failure(42), None, 1, 0)
    assert not allows(RestartPolicy(limits), failure(137, "Signaled", 9), None, 1, 0)
    assert not allows(RestartPolicy(limits), failure(137), None, 1, 0), "the program of a shell"
    assert allows(RestartPolicy(limits), failure(41), None, 1, 0)


@pytest.mark.parametrize(
    ("code", "is_signal"), [(128, False), (129, True), (191, True), (192, False)]
)
def test_the_exit_codes_of_signals_are_those_of_the_controller(code: int, is_signal: bool) -> None:
    limits = RestartLimits(9, signals=frozenset({0, 1, 63, 64}))
    assert allows(RestartPolicy(limits), failure(code), None, 1, 0) is not is_signal


def test_no_more_restarts_than_the_controller_permits() -> None:
    policy = RestartPolicy(RestartLimits(2))
    assert [allows(policy, failure(n), None, 1, n) for n in (0, 1, 2)] == [True, True, False]


def test_without_limits_nothing_restarts() -> None:
    assert not allows(RestartPolicy(read_limits("")), failure(), None, 1, 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"restarts": "x", "exitCodes": [], "signals": []}'])
def test_limits_that_cannot_be_read_name_the_variable(text: str) -> None:
    with pytest.raises(LaunchError, match="TORCHRUN_IN_PLACE_RESTARTS") as caught:
        read_limits(text)
    assert caught.value.reason == "InvalidSetting"


ERROR, OTHER = failure()._replace(message="OSError: no answer"), failure(reason="ExitCode")
EXISTS = failure()._replace(message="FileExistsError: out")


@pytest.mark.parametrize(
    ("first", "second", "by_leftovers"),
    [
        (RoundFailure(ERROR, 9), RoundFailure(OTHER, 1), True),
        (RoundFailure(ERROR, 9), RoundFailure(EXISTS, 1), True),
        (RoundFailure(ERROR, 9, 50), RoundFailure(EXISTS, 1), True),
        (RoundFailure(ERROR, 9, 50), RoundFailure(EXISTS, 1, 50), True),
        (RoundFailure(ERROR, 9), RoundFailure(failure(124, "Hung"), 700, is_silent=True), True),
        (RoundFailure(ERROR, 9), RoundFailure(ERROR, 1, is_silent=True), True),
        # Others happen again in the same pods.
        (RoundFailure(ERROR, 9), RoundFailure(ERROR._replace(message="OSError: busy"), 1), False),
        (RoundFailure(ERROR, 9), RoundFailure(OTHER, 10), False),
        (RoundFailure(ERROR, 9, 50), RoundFailure(OTHER, 1, 51), False),
        (RoundFailure(ERROR, 9, is_silent=True), RoundFailure(ERROR, 1, is_silent=True), False),
    ],
)
def test_a_round_that_fails_because_of_leftovers_needs_a_new_gang(
    first: RoundFailure, second: RoundFailure, by_leftovers: bool
) -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert policy.judge(first, 0) == Verdict(restart=True)
    assert policy.judge(second, 1) == Verdict(not by_leftovers, by_leftovers)
