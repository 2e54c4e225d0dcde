"""Reads whether the coordinator has admitted the gang of a job, or preempts it.

The coordinator owns the condition Admitted and `status.admission`: reconcile reads them and never
writes them. A job stays charged until reconcile has reported, in a status written after the
refusal, that no gang of it exists and none will be created.
"""

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueSpec
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.model.conditions import ADMITTED, Reason, find_condition
from torchrun_controller.reconcile.model.times import find_end
from torchrun_controller.reconcile.spec.requests import (
    GangRequests,
    admitted_requests,
    requests_of,
    shortfall,
)
from torchrun_controller.reconcile.spec.size import Size

# The reason of Admitted=False, and of the attempt that it ended.
PREEMPTED = "Preempted"
WAITING = "WaitingForAdmission"
# The reason of Admitted=False of a job whose next gang does not fit what was admitted.
OUTDATED = "AdmissionOutdated"
# What reconcile requests while the queue or the spec permits no gang, so that nobody waits for the
# nodes of this job.
UNUSABLE = "AdmissionUnusable"
# The condition with which reconcile requests admission, and answers its withdrawal.
REQUESTED = "AdmissionRequested"


def request(job: TorchrunJob) -> str:
    """Return what reconcile requests from the coordinator: one of the following, or "".

    WAITING: only the admission is missing for a gang. UNUSABLE: the admission is to be withdrawn.
    OUTDATED and PREEMPTED answer a refusal of the same reason: no gang of the job exists, and none
    will be created.
    """
    condition = find_condition(job.status.conditions, REQUESTED)
    return condition.reason if condition is not None and condition.status == "True" else ""


def takes_part(queue: TorchrunQueueSpec) -> bool:
    """Whether the jobs of a queue need admission; those of other queues may always run."""
    return queue.quota is not None or queue.weight is not None or queue.cohort is not None


def check_admission(job: TorchrunJob, queue: TorchrunQueue | None, size: Size) -> Reason | None:
    """Return why no gang of this size may be created yet; None if one may."""
    if queue is None or not takes_part(queue.spec):
        return None
    condition = _admitted(job)
    if condition is None:
        return Reason(WAITING, f"Waiting for admission in TorchrunQueue {queue.metadata.name}.")
    if condition.status != "True":
        return Reason(OUTDATED if condition.reason == OUTDATED else WAITING, condition.message)
    excess = find_excess(job, queue.metadata.name, requests_of(job, queue, size))
    return Reason(WAITING, f"{excess} {condition.message}") if excess else None


def find_excess(job: TorchrunJob, queue: str, requests: GangRequests) -> str:
    """Return what a gang requests in this queue beyond its admission; "" if all is admitted."""
    grant = granted_requests(job)
    if grant is None:
        return "The admission does not record its resource requests yet."
    assert job.status.admission is not None
    if job.status.admission.queue != queue:
        return f"The job requests admission in TorchrunQueue {queue}."
    return shortfall(requests, grant)


def granted_requests(job: TorchrunJob) -> GangRequests | None:
    """Return what was admitted; None if nothing is, or the admission does not record it."""
    admission = job.status.admission
    return admitted_requests(admission) if admission is not None and charged(job) else None


def node_limit(job: TorchrunJob, queue: TorchrunQueue | None) -> int | None:
    """Return the most nodes of the next gang; None if the queue takes no part in admission."""
    if queue is None or not takes_part(queue.spec):
        return None
    return charged(job)


def charged(job: TorchrunJob) -> int:
    """Return the nodes that the job is charged with in the quota of its queue.

    A charge is written together with its condition. Without one it is released, but stays in the
    status because another field manager has written it as well.
    """
    admission, condition = job.status.admission, _admitted(job)
    if admission is None or condition is None:
        return 0
    holds = condition.status == "True" or withdrawn(job)
    return max(0, admission.nodes) if holds else 0


def preempted(job: TorchrunJob) -> str:
    """Return why the job is preempted, with or without a gang; "" if it is not."""
    condition = _admitted(job)
    return condition.message if condition is not None and withdrawn(job) == PREEMPTED else ""


def withdrawn(job: TorchrunJob) -> str:
    """Return why a charged job may create no gang: PREEMPTED, OUTDATED or "".

    The charge is released once reconcile has answered with the same reason in its status.
    """
    condition = _admitted(job)
    if condition is None or condition.status != "False":
        return ""
    return condition.reason if condition.reason in (PREEMPTED, OUTDATED) else ""


def was_preempted(status: TorchrunJobStatus) -> bool:
    """Whether the last gang was preempted, and no other has followed it yet."""
    end = find_end(status.attempts, status.attempt)
    return end is not None and end.reason == PREEMPTED


def _admitted(job: TorchrunJob) -> Condition | None:
    return find_condition(job.status.conditions, ADMITTED)
