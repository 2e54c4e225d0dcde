"""Whether another gang follows a failed one, when, and how it and failed rounds are counted.

After a failed round, the launchers of a gang start the ranks again in the same pods. The launcher
of node 0 decides on such a restart within the limits of its gang, also while no controller runs. It
reports their number until the gang ends, and so does the termination message of each pod. The
status has the number that was counted, so each restart counts once, in whatever order the reports
and the status arrive.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import Enum

from msgspec import Struct

from torchrun_api import names
from torchrun_api.contract.exit_codes import PERMANENT
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.reliability import FailureRule
from torchrun_api.kinds.status import Attempt, LastFailure, TorchrunJobStatus
from torchrun_api.names import MOST_GANGS
from torchrun_controller.reconcile.gang.departure import MACHINE_LEAVING
from torchrun_controller.reconcile.gang.failures import PYTHON_MISSING, Failure, read_restarts
from torchrun_controller.reconcile.gang.headway import newest_saved
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import count_of, sentence
from torchrun_controller.reconcile.model.observed import FailedRound, ObservedGang
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.model.times import order_of
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, index_of
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability

# The first restart is immediate. The delay doubles from the second early failure in a row on.
FIRST_DELAY = timedelta(seconds=10)
LONGEST_DELAY = timedelta(minutes=5)
EARLY = timedelta(minutes=10)  # running time below which a failure is early
# Ends that a user, the queue or a change of the size asks for.
START_TIMEOUT = "StartTimeout"
INTENDED_ENDS = frozenset({"Suspended", "Preempted", "Resizing", "Shrinking", START_TIMEOUT})
# No back-off follows: nothing of the job has failed.
PLANNED_ENDS = INTENDED_ENDS | {MACHINE_LEAVING}
# Earlier times come from a broken clock. A start before the year 1 cannot be computed.
_EARLIEST_YEAR = 2000
_MESSAGE_CHARACTERS = 1024
AWAITING_EDIT = "AwaitingEdit"


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
    action = _action_without_limit(failure, policy)
    if action is FailureAction.RESTART and counts.restarts >= policy.max_restarts:
        return FailureAction.FAIL
    return action


def _action_without_limit(failure: Failure, policy: ResolvedReliability) -> FailureAction:
    if policy.never_restart or failure.details.reason in (PYTHON_MISSING, *PERMANENT):
        return FailureAction.FAIL
    rule = next((rule for rule in policy.rules if matches(rule, failure)), None)
    if rule is not None:
        return FailureAction(rule.action)
    return FailureAction.IGNORE if failure.disruption else FailureAction.RESTART


def describe_limit(failure: Failure, policy: ResolvedReliability) -> str:
    """Return which limit ends the job, as a further sentence; "" if the failure itself does."""
    if policy.never_restart:
        return " restartPolicy is Never."
    is_limit = _action_without_limit(failure, policy) is FailureAction.RESTART
    if is_limit and policy.max_restarts > 0:
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
    if end.reason in PLANNED_ENDS or _lasted(end):
        return timedelta()
    early_failures = 0
    for attempt in reversed(earlier_attempts):
        if _lasted(attempt):
            break
        early_failures += attempt.reason not in PLANNED_ENDS
    if early_failures == 0:
        return timedelta()
    doublings = min(early_failures - 1, 10)
    return min(FIRST_DELAY * (1 << doublings), LONGEST_DELAY)


def _lasted(attempt: Attempt) -> bool:
    """Whether all its workers ran for long enough together."""
    return attempt.running_seconds >= EARLY.total_seconds()


class NewRestarts(Struct, frozen=True):
    """Restarts of the present gang that the status does not have.

    `total` counts all of the gang. `ends` has those among the new ones that the report describes.
    `failure` is the last of them.
    """

    total: int = 0
    new: int = 0
    ends: tuple[Attempt, ...] = ()
    failure: LastFailure | None = None


def find_new_restarts(job: TorchrunJob, gang: ObservedGang) -> NewRestarts:
    """Return what the launchers report about the present gang, or what a failed one reported."""
    if not gang.child_jobs:
        return NewRestarts()
    number = attempt_of(gang.current_job)
    recorded = job.status.restarts_in_place if number == job.status.attempt else 0
    # Each pod that has ended knows the restarts before its end.
    total = max(gang.restarts.count, *map(read_restarts, gang.workers), 0)
    new = total - recorded
    if new <= 0:
        return NewRestarts(recorded)
    # A report may describe fewer restarts than there are new ones, and older ones.
    described = min(max(gang.restarts.count - recorded, 0), len(gang.restarts.last))
    rounds = gang.restarts.last[len(gang.restarts.last) - described :]
    failures = [_failure_of_round(failed_round, gang.workers) for failed_round in rounds]
    saved = newest_saved(gang)
    ends = (_end_of_round(number, saved, *pair) for pair in zip(rounds, failures, strict=True))
    return NewRestarts(total, new, tuple(ends), failures[-1] if failures else None)


def _failure_of_round(failed_round: FailedRound, workers: Iterable[Pod]) -> LastFailure:
    pod = next((pod for pod in workers if index_of(pod) == failed_round.node), None)
    name = pod.metadata.name if pod is not None else f"of node {failed_round.node}"
    return LastFailure(
        node=pod.spec.node_name if pod is not None else "",
        rank=failed_round.rank,
        exit_code=failed_round.exit_code,
        signal=failed_round.signal,
        reason=failed_round.reason,
        message=f"Pod {name}: {failed_round.message}"[:_MESSAGE_CHARACTERS],
        time=failed_round.time,
    )


def _end_of_round(
    number: int, saved: int | None, failed_round: FailedRound, failure: LastFailure
) -> Attempt:
    end_time = None if failure.time is None else failure.time.replace(microsecond=0)
    start_time = None
    if end_time is not None and end_time.year > _EARLIEST_YEAR:
        start_time = end_time - timedelta(seconds=round(failed_round.seconds))
    return Attempt(
        number=number,
        round=failed_round.round,
        node=failure.node,
        start_time=start_time,
        end_time=end_time,
        running_seconds=round(failed_round.seconds),
        step=failed_round.step,
        checkpoint_step=saved,
        counted=True,
        reason=failure.reason,
        message=failure.message[:512],
    )


def _failed_rounds(
    job: TorchrunJob, gang: ObservedGang, restarts: NewRestarts
) -> tuple[Attempt, ...]:
    """Return the known ends of rounds of the present gang, in the status or new."""
    number = attempt_of(gang.current_job)
    ends = (*job.status.attempts, *restarts.ends)
    return tuple(end for end in ends if end.number == number and end.round is not None)


def describe_restarts(job: TorchrunJob, gang: ObservedGang, restarts: NewRestarts) -> str:
    """Return the further sentences for the message of a gang that runs; "" without restarts."""
    if not restarts.total:
        return ""
    rounds = _failed_rounds(job, gang, restarts)
    cause = f" The last failure: {sentence(rounds[-1].message)}" if rounds else ""
    return f" {count_of(restarts.total, 'restart')} in the same pods.{cause}"


def describe_edit_wait(gang: ObservedGang) -> Reason | None:
    """Return why a gang in development mode runs without ranks; None if it does not."""
    failed_round = gang.restarts.awaits_edit
    if failed_round is None:
        return None
    cause = sentence(_failure_of_round(failed_round, gang.workers).message)
    message = f"The command failed, and the pods wait for the next edit. {cause}"
    return Reason(AWAITING_EDIT, message)


def restart_events(before: TorchrunJobStatus, composed: TorchrunJobStatus) -> tuple[Event, ...]:
    """Return an event for each round that the new status records as failed."""
    known = {order_of(end) for end in before.attempts}
    return tuple(
        Event(
            "Warning",
            "RestartedInPlace",
            f"Round {end.round} of attempt {end.number} failed. The ranks start again in the same"
            f" pods. {sentence(end.message)}",
        )
        for end in composed.attempts
        if end.round is not None and order_of(end) not in known
    )


def predecessor_annotation(
    job: TorchrunJob, gang: ObservedGang, restarts: NewRestarts
) -> JsonObject:
    """Return what a new pod of node 0 must know of earlier pods of the same Job, else nothing.

    A Job that was suspended has new pods when it resumes. Their launchers continue the count.
    """
    if not restarts.total:
        return {}
    rounds = (end.round or 0 for end in _failed_rounds(job, gang, restarts))
    first_round = max((*rounds, restarts.total - 1)) + 1
    return {names.IN_PLACE: f"{restarts.total} {first_round}"}


def restart_limits(policy: ResolvedReliability, counts: Counts) -> JsonObject | None:
    """Return what the launchers of the next gang may decide; None if each failure ends the gang.

    The controller decides on failures that rules match.
    """
    left = policy.max_restarts - counts.restarts
    if not policy.restarts_in_place or policy.never_restart or left <= 0:
        return None
    return {
        "restarts": left,
        "exitCodes": [*sorted({code for rule in policy.rules for code in rule.exit_codes})],
        "signals": [*sorted({number for rule in policy.rules for number in rule.signals})],
    }
