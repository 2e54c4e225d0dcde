"""The jobs of a queue: how many wait, and which of them keep it from going."""

from typing import Literal, TypeAlias

from torchrun_api.admission import QueueJobs
from torchrun_api.job import TorchrunJob
from torchrun_api.status import TERMINAL

Standing: TypeAlias = Literal["pending", "admitted", "running", "ended"]

GANG_PHASES = frozenset({"Queued", "Running", "Preempted"})


def runs(job: TorchrunJob) -> bool:
    """Whether it has a gang, or has had one that another follows: such a job needs its queue."""
    return job.status.phase in GANG_PHASES and job.status.workers is not None


def standing(job: TorchrunJob) -> Standing:
    """How far it is, as a queue counts it."""
    if job.status.phase in TERMINAL:
        return "ended"
    if job.status.phase == "Running":
        return "running"
    told = any(c.type == "Admitted" and c.status == "True" for c in job.status.conditions)
    return "admitted" if told or runs(job) else "pending"


def count(jobs: tuple[TorchrunJob, ...]) -> QueueJobs:
    """Jobs that have not ended, by how far they are."""
    all_told = [standing(job) for job in jobs]
    return QueueJobs(
        pending=all_told.count("pending"),
        admitted=all_told.count("admitted"),
        running=all_told.count("running"),
    )
