"""The jobs of a queue: how many wait, which keep it from being deleted, who schedules them."""

from typing import Literal, TypeAlias

from torchrun_api.admission import QueueJobs
from torchrun_api.job import TorchrunJob
from torchrun_api.status import TERMINAL
from torchrun_controller.reconcile.queue.model import ObservedQueue
from torchrun_controller.reconcile.schedulers.choice import Choice, choose
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

JobState: TypeAlias = Literal["pending", "admitted", "running", "ended"]

GANG_PHASES = frozenset({"Queued", "Running", "Preempted"})


def runs(job: TorchrunJob) -> bool:
    """Whether it has a gang, or has had one that another follows: such a job needs its queue."""
    return job.status.phase in GANG_PHASES and job.status.workers is not None


def state_of(job: TorchrunJob) -> JobState:
    """How far it is, as a queue counts it."""
    if job.status.phase in TERMINAL:
        return "ended"
    if job.status.phase == "Running":
        return "running"
    admitted = any(c.type == "Admitted" and c.status == "True" for c in job.status.conditions)
    return "admitted" if admitted or runs(job) else "pending"


def count(jobs: tuple[TorchrunJob, ...]) -> QueueJobs:
    """Jobs that have not ended, by how far they are."""
    states = [state_of(job) for job in jobs]
    return QueueJobs(
        pending=states.count("pending"),
        admitted=states.count("admitted"),
        running=states.count("running"),
    )


def choice_of(observed: ObservedQueue) -> Choice | None:
    """The choice for jobs that name no scheduler of their own; None while it cannot be made."""
    if observed.installed is None:
        return None
    try:
        return choose(observed.queue, observed.installed)
    except InvalidSpecError:
        return None
