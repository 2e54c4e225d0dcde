"""Restarts in place: failed rounds of a gang, whose launchers start the ranks in the same pods.

The launcher of node 0 decides on them within the limits of its gang, also while no controller runs.
It reports their number until the gang ends, and the termination message of each pod has it, too.
The status has the number that was counted, so each restart counts once, in whatever order the
reports and the status arrive.
"""

from collections.abc import Iterable
from datetime import timedelta

from msgspec import Struct

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.status import Attempt, LastFailure, TorchrunJobStatus
from torchrun_controller.reconcile.gang.failures import read_restarts
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model.attempts import order_of
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import count_of, sentence
from torchrun_controller.reconcile.model.observed import (
    FailedRound,
    ObservedGang,
)
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, index_of
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability

# Earlier times come from a broken clock. A start before the year 1 cannot be computed.
_EARLIEST_YEAR = 2000
_MESSAGE_CHARACTERS = 1024
AWAITING_EDIT = "AwaitingEdit"


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
    total = max(gang.restarts.count, _count_in_message(gang))
    new = total - recorded
    if new <= 0:
        return NewRestarts(recorded)
    # A report may describe fewer restarts than there are new ones, and older ones.
    described = min(max(gang.restarts.count - recorded, 0), len(gang.restarts.last))
    rounds = gang.restarts.last[len(gang.restarts.last) - described :]
    failures = [_failure(failed_round, gang.workers) for failed_round in rounds]
    ends = (_end(number, *pair) for pair in zip(rounds, failures, strict=True))
    return NewRestarts(total, new, tuple(ends), failures[-1] if failures else None)


def _count_in_message(gang: ObservedGang) -> int:
    """Return the most restarts that a pod of the gang wrote at its end; each knows those before."""
    return max(map(read_restarts, gang.workers), default=0)


def _failure(failed_round: FailedRound, workers: Iterable[Pod]) -> LastFailure:
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


def _end(number: int, failed_round: FailedRound, failure: LastFailure) -> Attempt:
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
    cause = sentence(_failure(failed_round, gang.workers).message)
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
