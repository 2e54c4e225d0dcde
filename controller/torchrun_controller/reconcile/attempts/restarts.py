"""Whether a gang that failed is followed by another, when, and what that counts for."""

from datetime import datetime, timedelta
from enum import Enum

from msgspec import Struct

from torchrun_api.reliability import FailureRule
from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.attempts.failures import Failure
from torchrun_controller.reconcile.policy import Policy

# The first restart is immediate; from the second failure in a row that came soon, delays grow.
FIRST_DELAY = timedelta(seconds=10)
LONGEST_DELAY = timedelta(minutes=5)
SOON = timedelta(minutes=10)
NO_FAILURES = frozenset({"Suspended", "Preempted", "Resizing", "Shrinking", "Growing"})


class Sentence(Enum):
    """What follows from a failure."""

    FAIL = "fail"
    RESTART = "restart"
    IGNORE = "ignore"


class Counts(Struct, frozen=True):
    """New gangs so far: those that maxRestarts counts, and the others."""

    restarts: int = 0
    disruptions: int = 0

    def after(self, sentence: Sentence) -> "Counts":
        """The counts of the gang that follows."""
        counted = sentence is Sentence.RESTART
        return Counts(self.restarts + counted, self.disruptions + (not counted))


def judge(failure: Failure, policy: Policy, counts: Counts) -> Sentence:
    """The first rule that matches decides; else disruptions are not counted and failures are."""
    if policy.never_restart:
        return Sentence.FAIL
    rule = next((rule for rule in policy.rules if matches(rule, failure)), None)
    if rule is not None:
        sentence = Sentence(rule.action)
    else:
        sentence = Sentence.IGNORE if failure.disruption else Sentence.RESTART
    if sentence is Sentence.RESTART and counts.restarts >= policy.max_restarts:
        return Sentence.FAIL
    return sentence


def matches(rule: FailureRule, failure: Failure) -> bool:
    """Whether any entry of the rule fits."""
    said: LastFailure = failure.said
    return (
        said.exit_code in rule.exit_codes
        or said.signal in rule.signals
        or any(condition in rule.pod_conditions for condition in failure.conditions)
    )


def delay(attempts: tuple[Attempt, ...], began: datetime | None, ended: datetime) -> timedelta:
    """From the end of a gang to its successor.

    `attempts` are the gangs before it, `began` is its own creation. Failures in a row count, from
    the last gang that lasted on; what the user ended does not.
    """
    if _lasted(began, ended):
        return timedelta()
    quick = 0
    for attempt in reversed(attempts):
        if _lasted(attempt.start_time, attempt.end_time):
            break
        quick += attempt.reason not in NO_FAILURES
    if quick == 0:
        return timedelta()
    doublings = min(quick - 1, 10)
    return min(FIRST_DELAY * (1 << doublings), LONGEST_DELAY)


def _lasted(began: datetime | None, ended: datetime | None) -> bool:
    return began is not None and ended is not None and ended - began >= SOON


def unreachable(rules: tuple[FailureRule, ...]) -> int | None:
    """Index of the first rule that can never match, because earlier ones take all that it names."""
    codes: set[int] = set()
    signals: set[int] = set()
    conditions: set[str] = set()
    for index, rule in enumerate(rules):
        new = (
            set(rule.exit_codes) - codes
            or set(rule.signals) - signals
            or set(rule.pod_conditions) - conditions
        )
        if not new:
            return index
        codes |= set(rule.exit_codes)
        signals |= set(rule.signals)
        conditions |= set(rule.pod_conditions)
    return None
