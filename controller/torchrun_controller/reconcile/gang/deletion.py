"""A user deletes the child Job of a gang. The gang ends, and that is not a failure of its own.

A foreground deletion ends only with the last pod, and the pods of a lost node never end. Nothing
waits for it: the next gang is created, and its gate waits for the pods as after any other end.
"""

from datetime import datetime

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang.failures import POD_DELETED, Failure
from torchrun_controller.reconcile.model.attempts import find_end
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.times import seconds_of_gang
from torchrun_controller.reconcile.pods import head_and_workers

JOB_DELETED = "JobDeleted"


def find_deletion(job: TorchrunJob, gang: ObservedGang) -> Failure | None:
    """Return the deletion of a Job of the present gang; None if none is being deleted."""
    name = head_and_workers.find_deleted_job(job, gang)
    return _job_deleted(name, gang.current_job.metadata.deletion_timestamp) if name else None


def find_vanished_gang(job: TorchrunJob, now: datetime) -> tuple[Failure, Attempt] | None:
    """Return the deletion of a gang whose Job is gone and whose end the status does not have.

    The controller itself deletes the Job of the present attempt only after the status has its end.
    """
    status = job.status
    if status.workers is None or find_end(status.attempts, status.attempt) is not None:
        return None
    failure = _job_deleted(names.child_job(job.metadata.name, status.attempt), now)
    end = Attempt(
        number=status.attempt,
        end_time=now,
        running_seconds=round(seconds_of_gang(status, now)),
        reason=JOB_DELETED,
        message=failure.details.message,
    )
    return failure, end


def precedes(deletion: Failure, failure: Failure) -> bool:
    """Whether the deletion is the cause of the failure: the failure is later, or a deleted pod."""
    if failure.details.reason == POD_DELETED:
        return True
    deletion_time, failure_time = deletion.details.time, failure.details.time
    return deletion_time is None or failure_time is None or failure_time >= deletion_time


def _job_deleted(name: str, time: datetime | None) -> Failure:
    message = f"Job {name} was deleted"
    return Failure(
        details=LastFailure(reason=JOB_DELETED, message=message, time=time), disruption=True
    )
