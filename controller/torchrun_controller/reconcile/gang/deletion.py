"""Somebody else deletes the child Job of a gang: its end, and no failure of its own.

A deletion in the foreground ends only with the last pod, which on a lost node is never: nothing
waits for it. The next gang is created, and its gate waits for the pods, as after any other end.
"""

from datetime import datetime

from torchrun_api import names
from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang.failures import POD_DELETED, Failure
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.times import seconds_of_gang
from torchrun_controller.reconcile.pods import head_and_workers

JOB_DELETED = "JobDeleted"


def of_gang(observed: Observed) -> Failure | None:
    """The deletion of a Job of the gang that is there; None if nobody deletes one."""
    name = head_and_workers.find_deleted_job(observed.job, observed.gang)
    return _failure(name, observed.gang.current_job.metadata.deletion_timestamp) if name else None


def of_lost_gang(observed: Observed, now: datetime) -> tuple[Failure, Attempt] | None:
    """The deletion of a gang whose Job is gone without a word in the status, and its record.

    The controller deletes the Job of the present attempt only after the status has its end.
    """
    status = observed.job.status
    if status.workers is None or any(a.number == status.attempt for a in status.attempts):
        return None
    failure = _failure(names.child_job(observed.job.metadata.name, status.attempt), now)
    ended = Attempt(
        number=status.attempt,
        end_time=now,
        running_seconds=round(seconds_of_gang(status, now)),
        reason=JOB_DELETED,
        message=failure.said.message,
    )
    return failure, ended


def comes_before(deleted: Failure, other: Failure) -> bool:
    """Whether the deletion is the cause: what ends after it, or by it, is collateral."""
    if other.said.reason == POD_DELETED:
        return True
    began, ended = deleted.said.time, other.said.time
    return began is None or ended is None or ended >= began


def _failure(name: str, time: datetime | None) -> Failure:
    message = f"somebody deleted Job {name}"
    return Failure(
        said=LastFailure(reason=JOB_DELETED, message=message, time=time), disruption=True
    )
