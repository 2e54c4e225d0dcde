"""Whether the coordinator has admitted the gang of a job, and has it give way to another.

It says so in the condition Admitted and in `status.admission`, which are its own: reconcile reads
them and never writes them. What is charged for a job stays charged until reconcile has said, in
a status made from the refusal, that no gang of it is there and none will be made.
"""

from torchrun_api.job import TorchrunJob
from torchrun_api.meta import Condition
from torchrun_api.queue import TorchrunQueueSpec
from torchrun_controller.reconcile.conditions import ADMITTED
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.workers import Why

# The reason of Admitted=False, and of the attempt that ended by it.
PREEMPTED = "Preempted"
WAITING = "WaitingForAdmission"


def takes_part(queue: TorchrunQueueSpec) -> bool:
    """Whether the jobs of a queue run by admission only; those of the others always may."""
    return queue.quota is not None or queue.weight is not None or queue.cohort is not None


def missing(observed: Observed, nodes: int) -> Why | None:
    """Why no gang of so many nodes may be made yet; None if one may."""
    job, queue = observed.job, observed.queue
    if queue is None or not takes_part(queue.spec):
        return None
    said = _said(job)
    if said is None:
        return Why(WAITING, f"waits for its turn in TorchrunQueue {queue.metadata.name}")
    if said.status != "True":
        return Why(WAITING, said.message)
    if charged(job) < nodes:
        return Why(WAITING, f"{nodes} nodes are asked for: {said.message}")
    return None


def charged(job: TorchrunJob) -> int:
    """Nodes that its queue's quota is charged with for it."""
    return max(0, job.status.admission.nodes) if job.status.admission is not None else 0


def preempted(job: TorchrunJob) -> str:
    """Why the gang, or the right to make one, is taken away; "" if it is not."""
    said = _said(job)
    if said is None or (said.status, said.reason) != ("False", PREEMPTED):
        return ""
    return said.message


def was_preempted(observed: Observed) -> bool:
    """Whether the job's last gang gave way, and none has followed it yet."""
    status = observed.job.status
    return any(a.number == status.attempt and a.reason == PREEMPTED for a in status.attempts)


def _said(job: TorchrunJob) -> Condition | None:
    return next((c for c in job.status.conditions if c.type == ADMITTED), None)
