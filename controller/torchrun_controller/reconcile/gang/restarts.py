"""Whether a gang that failed is followed by another, when, and what that counts for."""

from collections.abc import Iterable
from datetime import timedelta
from enum import Enum

from msgspec import Struct

from torchrun_api.reliability import FailureRule
from torchrun_api.status import MOST_GANGS, Attempt, LastFailure
from torchrun_controller.reconcile.gang.failures import Failure
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability

# The first restart is immediate; from the second failure in a row that came soon, delays grow.
FIRST_DELAY = timedelta(seconds=10)
LONGEST_DELAY = timedelta(minutes=5)
SOON = timedelta(minutes=10)
NO_FAILURES = frozenset({"Suspended", "Preempted", "Resizing", "Shrinking", "Growing"})


class FailureAction(Enum):
    """What follows from a failure."""

    FAIL = "fail"
    RESTART = "restart"
    IGNORE = "ignore"


class Counts(Struct, frozen=True):
    """New gangs so far: those that maxRestarts counts, and the others."""

    restarts: int = 0
    disruptions: int = 0

    def after(self, action: FailureAction) -> "Counts":
        """The counts of the gang that follows. They stop at what the status may show."""
        counted = action is FailureAction.RESTART
        return Counts(
            min(self.restarts + counted, MOST_GANGS),
            min(self.disruptions + (not counted), MOST_GANGS),
        )

    def without(self, ends: Iterable[Attempt]) -> "Counts":
        """The counts as they were before these ends were recorded."""
        failures = [end for end in ends if end.reason not in NO_FAILURES]
        counted = sum(end.counted for end in failures)
        ignored = len(failures) - counted
        return Counts(max(self.restarts - counted, 0), max(self.disruptions - ignored, 0))


def evaluate_failure_policy(
    failure: Failure, policy: ResolvedReliability, counts: Counts
) -> FailureAction:
    """The first rule that matches decides; else disruptions are not counted and failures are."""
    if policy.never_restart:
        return FailureAction.FAIL
    rule = next((rule for rule in policy.rules if matches(rule, failure)), None)
    if rule is not None:
        action = FailureAction(rule.action)
    else:
        action = FailureAction.IGNORE if failure.disruption else FailureAction.RESTART
    if action is FailureAction.RESTART and counts.restarts >= policy.max_restarts:
        return FailureAction.FAIL
    return action


def why_final(policy: ResolvedReliability, counts: Counts) -> str:
    """Why no gang follows, to be added to what failed; "" where a rule says so."""
    if policy.never_restart:
        return "; restartPolicy is Never"
    if counts.restarts >= policy.max_restarts > 0:
        return f"; all {policy.max_restarts} restarts are used up"
    return ""


def matches(rule: FailureRule, failure: Failure) -> bool:
    """Whether any entry of the rule fits."""
    said: LastFailure = failure.said
    return (
        said.exit_code in rule.exit_codes
        or said.signal in rule.signals
        or any(condition in rule.pod_conditions for condition in failure.conditions)
    )


def delay(before: tuple[Attempt, ...], ended: Attempt) -> timedelta:
    """From the end of a gang to its successor; `before` are the gangs before it.

    Failures in a row count, from the last gang that lasted on; what the user ended does not.
    """
    if ended.reason in NO_FAILURES or _lasted(ended):
        return timedelta()
    quick = 0
    for attempt in reversed(before):
        if _lasted(attempt):
            break
        quick += attempt.reason not in NO_FAILURES
    if quick == 0:
        return timedelta()
    doublings = min(quick - 1, 10)
    return min(FIRST_DELAY * (1 << doublings), LONGEST_DELAY)


def _lasted(attempt: Attempt) -> bool:
    """Whether all its workers ran for long: the time before that says nothing of the job."""
    return attempt.running_seconds >= SOON.total_seconds()
