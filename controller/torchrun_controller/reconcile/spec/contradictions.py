"""Contradictions between a job and its queue; the CRDs validate each of them alone.

A job's value overrides its queue's, so only different fields can contradict each other.
"""

from torchrun_api.gang_schedulers import GANG_SCHEDULERS
from torchrun_api.job import TorchrunJobSpec
from torchrun_api.queue import TorchrunQueue
from torchrun_api.reliability import Reliability


def contradiction(
    spec: TorchrunJobSpec, queue: TorchrunQueue, *, never_restarts: bool
) -> str | None:
    """Return the first contradiction, with both fields and what to do; None if there is none.

    `never_restarts` is from the settings at the start of the job. The queue may have others now.
    """
    of_queue = f"of TorchrunQueue {queue.metadata.name}"
    backend = spec.distributed.rdzv_backend or queue.spec.distributed.rdzv_backend
    if spec.elastic is not None and backend == "static":
        return (
            f"spec.elastic conflicts with distributed.rdzvBackend static {of_queue}. Set"
            " spec.distributed.rdzvBackend to c10d."
        )
    if spec.head is not None:
        problem = _check_head(spec, queue)
        if problem is not None:
            return problem
    restart_field = _restart_field(spec.reliability)
    queue_forbids = never_restarts and spec.reliability.restart_policy is None
    if restart_field is not None and queue_forbids:
        return (
            f"{restart_field} conflicts with reliability.restartPolicy Never {of_queue}. Set"
            " spec.reliability.restartPolicy to OnFailure."
        )
    return None


def _check_head(spec: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    """Return why a job of this queue cannot have a head."""
    if spec.elastic is not None:
        return (
            "spec.head conflicts with spec.elastic: a gang with a head has a fixed size. Remove"
            " one of the two fields."
        )
    if (spec.num_nodes or 0) < 2:
        return (
            "spec.head requires spec.numNodes of at least 2: the head and its workers. Increase"
            " spec.numNodes or remove spec.head."
        )
    gang = queue.spec.scheduling.gang
    if gang is not None and GANG_SCHEDULERS[gang].admits_jobs:
        return (
            f"spec.head conflicts with scheduling.gang {gang} of TorchrunQueue"
            f" {queue.metadata.name}: {GANG_SCHEDULERS[gang].title} admits each Job separately, and"
            " a gang with a head has two. Remove spec.head or choose another queue."
        )
    return None


def over_limit(nodes: int, most: int | None, queue: TorchrunQueue) -> str | None:
    """Return a message if the gang has more nodes than the queue allows."""
    if most is None or nodes <= most:
        return None
    return (
        f"The job requests {nodes} nodes, but limits.maxNodesPerJob of TorchrunQueue"
        f" {queue.metadata.name} is {most}. Request fewer nodes or choose another queue."
    )


def over_priority(job: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    """Return a message if the priority is above what the queue allows."""
    most = queue.spec.limits.max_priority
    if most is None or job.priority is None or job.priority <= most:
        return None
    return (
        f"spec.priority is {job.priority}, but limits.maxPriority of TorchrunQueue"
        f" {queue.metadata.name} is {most}. Lower spec.priority or choose another queue."
    )


def _restart_field(reliability: Reliability) -> str | None:
    """Return the first field of the job that allows restarts."""
    if reliability.max_restarts:
        return f"spec.reliability.maxRestarts {reliability.max_restarts}"
    for index, rule in enumerate(reliability.rules or ()):
        if rule.action != "fail":
            return f"spec.reliability.rules[{index}].action {rule.action}"
    return None
