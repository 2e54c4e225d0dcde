"""Whether the coordinator has admitted the gang of a job, and has it give way to another.

It says so in the condition Admitted and in `status.admission`, which are its own: reconcile reads
them and never writes them. What is charged for a job stays charged until reconcile has said, in
a status made from the refusal, that no gang of it is there and none will be made.
"""

from msgspec.structs import replace

from torchrun_api.job import TorchrunJob
from torchrun_api.meta import Condition
from torchrun_api.queue import TorchrunQueueSpec
from torchrun_controller.reconcile.model.conditions import ADMITTED, Reason, find_condition
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.spec.requests import (
    GangRequests,
    admitted_requests,
    requests_of,
    shortfall,
)
from torchrun_controller.reconcile.spec.size import Size

# The reason of Admitted=False, and of the attempt that ended by it.
PREEMPTED = "Preempted"
WAITING = "WaitingForAdmission"
# The reason of Admitted=False of a job whose next gang does not fit what was admitted.
OUTDATED = "AdmissionOutdated"
# The condition by which reconcile asks for admission, and answers where it is taken back.
REQUESTED = "AdmissionRequested"
# The condition of an elastic job that says how its size stands, and its reason while nodes that it
# does not use are given back.
FULL_SIZE = "FullSize"
GIVES_BACK = "GivesBackNodes"


def request(job: TorchrunJob) -> str:
    """What reconcile asks of the coordinator: WAITING, OUTDATED, PREEMPTED, or "".

    WAITING: nothing is missing for a gang but the admission. The other two answer a refusal of the
    same reason: no gang of the job is there, and none will be made.
    """
    condition = find_condition(job.status.conditions, REQUESTED)
    return condition.reason if condition is not None and condition.status == "True" else ""


def takes_part(queue: TorchrunQueueSpec) -> bool:
    """Whether the jobs of a queue run by admission only; those of the others always may."""
    return queue.quota is not None or queue.weight is not None or queue.cohort is not None


def missing(observed: Observed, size: Size) -> Reason | None:
    """Why no gang of this size may be made yet; None if one may."""
    job, queue = observed.job, observed.queue
    if queue is None or not takes_part(queue.spec):
        return None
    said = _said(job)
    if said is None:
        return Reason(WAITING, f"waits for its turn in TorchrunQueue {queue.metadata.name}")
    if said.status != "True":
        return Reason(OUTDATED if said.reason == OUTDATED else WAITING, said.message)
    excess = outdated(job, queue.metadata.name, requests_of(job, queue, size))
    return Reason(WAITING, f"{excess}: {said.message}") if excess else None


def outdated(job: TorchrunJob, queue: str, asked: GangRequests) -> str:
    """What a gang asks for in this queue that is not admitted; "" if all of it is."""
    granted = granted_to(job)
    if granted is None:
        return "the admission does not say yet what it is for"
    assert job.status.admission is not None
    if job.status.admission.queue != queue:
        return f"admission in TorchrunQueue {queue} is asked for"
    return shortfall(asked, replace(granted, nodes=_most_nodes(job)))


def granted_to(job: TorchrunJob) -> GangRequests | None:
    """What was admitted; None where nothing is, or it does not say."""
    admission = job.status.admission
    return admitted_requests(admission) if admission is not None and charged(job) else None


def most_nodes(observed: Observed) -> int | None:
    """Most nodes of the next gang; None where the queue takes no part in admission."""
    if observed.queue is None or not takes_part(observed.queue.spec):
        return None
    return _most_nodes(observed.job)


def gives_back(job: TorchrunJob) -> bool:
    """Whether it may not use all that it is charged with: the rest is about to be given back."""
    return _most_nodes(job) < charged(job)


def has_given_back(job: TorchrunJob) -> bool:
    """Whether reconcile has said that no gang takes more than the limit.

    The coordinator sets no other limit before this is taken back: so it is the answer to this one.
    """
    full_size = find_condition(job.status.conditions, FULL_SIZE)
    return full_size is not None and full_size.reason == GIVES_BACK


def _most_nodes(job: TorchrunJob) -> int:
    nodes, admission = charged(job), job.status.admission
    limit = admission.limit if admission is not None else 0
    return min(nodes, limit) if limit > 0 else nodes


def charged(job: TorchrunJob) -> int:
    """Nodes that its queue's quota is charged with for it."""
    return max(0, job.status.admission.nodes) if job.status.admission is not None else 0


def preempted(job: TorchrunJob) -> str:
    """Why the gang, or the right to make one, is taken away; "" if it is not."""
    said = _said(job)
    return said.message if said is not None and withdrawn(job) == PREEMPTED else ""


def withdrawn(job: TorchrunJob) -> str:
    """The reason why a charged job may make no gang: PREEMPTED, OUTDATED or "".

    The charge is given back once reconcile has answered with the same reason in its status.
    """
    said = _said(job)
    if said is None or said.status != "False" or said.reason not in (PREEMPTED, OUTDATED):
        return ""
    return said.reason


def was_preempted(observed: Observed) -> bool:
    """Whether the job's last gang gave way, and none has followed it yet."""
    status = observed.job.status
    return any(a.number == status.attempt and a.reason == PREEMPTED for a in status.attempts)


def _said(job: TorchrunJob) -> Condition | None:
    return find_condition(job.status.conditions, ADMITTED)
