"""Contradictions between a job and its queue; the CRDs validate each of them alone.

A job's value overrides its queue's, so only different fields can contradict each other.
"""

from torchrun_api.job import TorchrunJobSpec
from torchrun_api.queue import TorchrunQueue
from torchrun_api.reliability import Reliability


def contradiction(spec: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    """Return the first contradiction, with both fields and what to do; None if there is none."""
    whose = f"of TorchrunQueue {queue.metadata.name}"
    backend = spec.distributed.rdzv_backend or queue.spec.distributed.rdzv_backend
    if spec.elastic is not None and backend == "static":
        return (
            f"spec.elastic contradicts distributed.rdzvBackend static {whose};"
            " set spec.distributed.rdzvBackend to c10d"
        )
    if spec.head is not None:
        alone = _without_head(spec, queue)
        if alone is not None:
            return alone
    mine = spec.reliability
    restarts = _restarts(mine)
    inherited = mine.restart_policy is None and queue.spec.reliability.restart_policy == "Never"
    if restarts is not None and inherited:
        return (
            f"{restarts} contradicts reliability.restartPolicy Never {whose};"
            " set spec.reliability.restartPolicy to OnFailure"
        )
    return None


def _without_head(spec: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    if spec.elastic is not None:
        return "spec.head contradicts spec.elastic: a gang with a head has one size; remove one"
    if (spec.num_nodes or 0) < 2:
        return "spec.head needs spec.numNodes of 2 or more: the head and its workers"
    if queue.spec.scheduling.gang == "kueue":
        return (
            "spec.head contradicts scheduling.gang kueue of TorchrunQueue"
            f" {queue.metadata.name}: Kueue admits Jobs one by one, and such a gang has two;"
            " remove spec.head, or choose another queue"
        )
    return None


def over_limit(nodes: int, most: int | None, queue: TorchrunQueue) -> str | None:
    """Return a message if the gang has more nodes than the queue allows."""
    if most is None or nodes <= most:
        return None
    return (
        f"spec: {nodes} nodes, but limits.maxNodesPerJob {most} of TorchrunQueue"
        f" {queue.metadata.name} allows no more; ask for fewer, or choose another queue"
    )


def over_priority(job: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    """Return a message if the priority is above what the queue allows."""
    most = queue.spec.limits.max_priority
    if most is None or job.priority is None or job.priority <= most:
        return None
    return (
        f"spec.priority: {job.priority}, but limits.maxPriority {most} of TorchrunQueue"
        f" {queue.metadata.name} allows no more; lower it, or choose another queue"
    )


def _restarts(mine: Reliability) -> str | None:
    """Return the first field of the job that allows restarts."""
    if mine.max_restarts:
        return f"spec.reliability.maxRestarts {mine.max_restarts}"
    for index, rule in enumerate(mine.rules or ()):
        if rule.action != "fail":
            return f"spec.reliability.rules[{index}].action {rule.action}"
    return None
