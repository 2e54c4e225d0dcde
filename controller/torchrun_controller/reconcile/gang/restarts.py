"""The failure policy: whether another gang follows a failed one, when, and how it is counted."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import Enum

from msgspec import Struct

from torchrun_api.exit_codes import PERMANENT
from torchrun_api.names import MOST_GANGS
from torchrun_api.reliability import FailureRule
from torchrun_api.status import Attempt
from torchrun_controller.reconcile.gang.failures import PYTHON_MISSING, Failure
from torchrun_controller.reconcile.model.attempts import order_of
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability

# The first restart is immediate. The delay doubles from the second early failure in a row on.
FIRST_DELAY = timedelta(seconds=10)
LONGEST_DELAY = timedelta(minutes=5)
EARLY = timedelta(minutes=10)  # running time below which a failure is early
# Ends that a user, the queue or a change of the size asks for.
START_TIMEOUT = "StartTimeout"
INTENDED_ENDS = frozenset({"Suspended", "Preempted", "Resizing", "Shrinking", START_TIMEOUT})


class FailureAction(Enum):
    """The consequence of a failure."""

    FAIL = "fail"
    RESTART = "restart"
    IGNORE = "ignore"


class Counts(Struct, frozen=True):
    """Numbers of restarts: those that maxRestarts counts, and the others."""

    restarts: int = 0
    disruptions: int = 0

    def after(self, action: FailureAction) -> "Counts":
        """Return the counts of the next gang, at most the maximum of the status fields."""
        is_counted = action is FailureAction.RESTART
        return Counts(
            min(self.restarts + is_counted, MOST_GANGS),
            min(self.disruptions + (not is_counted), MOST_GANGS),
        )

    def after_rounds(self, restarts: int) -> "Counts":
        """Return the counts after restarts in place, which are always counted."""
        return Counts(min(self.restarts + restarts, MOST_GANGS), self.disruptions)

    def without(self, ends: Iterable[Attempt]) -> "Counts":
        """Return the counts from before these ends were recorded."""
        failures = [end for end in ends if end.reason not in INTENDED_ENDS]
        counted_ends = sum(end.counted for end in failures)
        ignored_ends = len(failures) - counted_ends
        return Counts(max(self.restarts - counted_ends, 0), max(self.disruptions - ignored_ends, 0))


def evaluate_failure_policy(
    failure: Failure, policy: ResolvedReliability, counts: Counts
) -> FailureAction:
    """Return the action of the first matching rule. By default only failures are counted.

    A failure that no restart corrects, such as an image without torch, fails the job at once.
    """
    is_permanent = failure.details.reason in (PYTHON_MISSING, *PERMANENT)
    if policy.never_restart or is_permanent:
        return FailureAction.FAIL
    rule = next((rule for rule in policy.rules if matches(rule, failure)), None)
    if rule is not None:
        action = FailureAction(rule.action)
    else:
        action = FailureAction.IGNORE if failure.disruption else FailureAction.RESTART
    if action is FailureAction.RESTART and counts.restarts >= policy.max_restarts:
        return FailureAction.FAIL
    return action


def describe_limit(policy: ResolvedReliability, counts: Counts) -> str:
    """Return why no gang follows, as a further sentence; "" where a rule is the reason."""
    if policy.never_restart:
        return " restartPolicy is Never."
    if counts.restarts >= policy.max_restarts > 0:
        return f" All restarts are used (maxRestarts is {policy.max_restarts})."
    return ""


def matches(rule: FailureRule, failure: Failure) -> bool:
    """Whether any entry of the rule matches."""
    details = failure.details
    return (
        details.exit_code in rule.exit_codes
        or details.signal in rule.signals
        or any(condition in rule.pod_conditions for condition in failure.conditions)
    )


class RestartDelay(Struct, frozen=True):
    """The reason for the status, and the seconds until the next attempt."""

    why: Reason
    seconds_left: float


def find_backoff(ends: Iterable[Attempt], end: Attempt, now: datetime) -> RestartDelay | None:
    """Return the back-off after this gang; None once it is over, or if there is none.

    `ends` are those of the job, in the status or not.
    """
    earlier_attempts = tuple(
        sorted((each for each in ends if order_of(each) < order_of(end)), key=order_of)
    )
    delay = restart_delay(earlier_attempts, end)
    seconds_left = (delay - (now - (end.end_time or now))).total_seconds()
    if seconds_left <= 0:
        return None
    message = (
        f"Attempt {end.number + 1} starts {delay.total_seconds():.0f} s after the end of attempt"
        f" {end.number} (back-off). {sentence(end.message)}"
    )
    return RestartDelay(Reason("BackingOff", message), seconds_left)


def restart_delay(earlier_attempts: tuple[Attempt, ...], end: Attempt) -> timedelta:
    """Return the delay from the end of a gang to the next one.

    Early failures in a row count. A gang that lasted resets them; an end by the user is not one.
    """
    if end.reason in INTENDED_ENDS or _lasted(end):
        return timedelta()
    early_failures = 0
    for attempt in reversed(earlier_attempts):
        if _lasted(attempt):
            break
        early_failures += attempt.reason not in INTENDED_ENDS
    if early_failures == 0:
        return timedelta()
    doublings = min(early_failures - 1, 10)
    return min(FIRST_DELAY * (1 << doublings), LONGEST_DELAY)


def _lasted(attempt: Attempt) -> bool:
    """Whether all its workers ran for long enough together."""
    return attempt.running_seconds >= EARLY.total_seconds()
