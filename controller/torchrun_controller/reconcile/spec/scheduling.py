"""Where pods of a job may run: the settings of the job over those of its queue."""

from typing import NamedTuple

from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.queue import TorchrunQueue


class Scheduling(NamedTuple):
    """Fields of a v1 PodSpec."""

    node_selector: dict[str, str]
    tolerations: tuple[JsonObject, ...]
    affinity: JsonObject | None


def scheduling_of(job: TorchrunJob, queue: TorchrunQueue | None) -> Scheduling:
    """Return the merged settings; those of the job alone if the queue does not exist."""
    override = job.spec.scheduling
    if queue is None:
        return Scheduling(override.node_selector, override.tolerations, override.affinity)
    base = queue.spec.scheduling
    return Scheduling(
        base.node_selector | override.node_selector,
        base.tolerations + override.tolerations,
        base.affinity if override.affinity is None else override.affinity,
    )
