"""Restarts in place stay within the limits of the controller."""

import pytest

from torchrun_runtime.launch.errors import LaunchError
from torchrun_runtime.launch.failure import Cause
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy, read_limits

TIME = "2026-01-01T00:00:00.000000Z"


def failure(code: int = 1, reason: str = "Exception", signal: "int | None" = None) -> Cause:
    return Cause(code, 0, signal, reason, "no", TIME)


def test_a_third_failure_of_one_kind_without_a_newer_step_is_not_allowed() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert [policy.allows(failure(), 5, 1, 0) for _ in range(3)] == [True, True, False]


def test_a_newer_step_counts_as_progress() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert all(policy.allows(failure(), step, 1, 0) for step in (5, 6, 7, 8))
    assert [policy.allows(failure(), 8, 1, 0) for _ in range(2)] == [True, False]


def test_a_round_without_steps_that_lasted_counts_as_progress() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert all(policy.allows(failure(), None, 600, 0) for _ in range(5))


def test_failures_of_different_kinds_are_counted_apart() -> None:
    policy = RestartPolicy(RestartLimits(9))
    assert all(policy.allows(failure(code), None, 1, 0) for code in (1, 2, 1, 2, 1))


@pytest.mark.parametrize("reason", ["OOMKilled", "Fenced", "Stopped", "LaunchFailed"])
def test_other_failures_need_a_new_gang(reason: str) -> None:
    assert not RestartPolicy(RestartLimits(9)).allows(failure(reason=reason), None, 1, 0)


def test_exit_codes_and_signals_of_rules_are_left_to_the_controller() -> None:
    limits = read_limits('{"restarts": 9, "exitCodes": [42], "signals": [9]}')
    assert not RestartPolicy(limits).allows(failure(42), None, 1, 0)
    assert not RestartPolicy(limits).allows(failure(137, "Signaled", 9), None, 1, 0)
    assert not RestartPolicy(limits).allows(failure(137), None, 1, 0), "the program of a shell"
    assert RestartPolicy(limits).allows(failure(41), None, 1, 0)


@pytest.mark.parametrize(
    ("code", "is_signal"), [(128, False), (129, True), (191, True), (192, False)]
)
def test_the_exit_codes_of_signals_are_those_of_the_controller(code: int, is_signal: bool) -> None:
    limits = RestartLimits(9, signals=frozenset({0, 1, 63, 64}))
    assert RestartPolicy(limits).allows(failure(code), None, 1, 0) is not is_signal


def test_no_more_restarts_than_the_controller_permits() -> None:
    policy = RestartPolicy(RestartLimits(2))
    assert [policy.allows(failure(n), None, 1, n) for n in (0, 1, 2)] == [True, True, False]


def test_without_limits_nothing_restarts() -> None:
    assert not RestartPolicy(read_limits("")).allows(failure(), None, 1, 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"restarts": "x", "exitCodes": [], "signals": []}'])
def test_limits_that_cannot_be_read_name_the_variable(text: str) -> None:
    with pytest.raises(LaunchError, match="TORCHRUN_IN_PLACE_RESTARTS") as caught:
        read_limits(text)
    assert caught.value.reason == "InvalidSetting"
