"""The jobs of a queue: their counts, those that block its deletion, and their scheduler."""

from typing import Literal, TypeAlias

from torchrun_api.admission import QueueJobs
from torchrun_api.job import TorchrunJob
from torchrun_api.status import TERMINAL
from torchrun_controller.reconcile.model.phases import GANG_PHASES
from torchrun_controller.reconcile.queue.model import ObservedQueue
from torchrun_controller.reconcile.schedulers.choice import Choice, choose
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

JobState: TypeAlias = Literal["pending", "admitted", "running", "ended"]


def needs_queue(job: TorchrunJob) -> bool:
    """Whether the job has a gang, or is about to create its next one: both need the queue.

    Newer code or a new environment for the next gang is Syncing. A gang whose Service is refused is
    Pending. A job that was preempted, for example, waits for a new admission: a queue that is being
    deleted grants none, so it does not wait for that job.
    """
    phase, workers = job.status.phase, job.status.workers
    if workers is None or (_waits_for_admission(job) and not workers.running):
        return False
    if phase in GANG_PHASES or phase == "Syncing":
        return True
    return phase == "Pending" and workers.pending + workers.running > 0


def _waits_for_admission(job: TorchrunJob) -> bool:
    """Whether only an admission is missing for the next gang, and the job has no charge either."""
    is_waiting = admission_status.request(job) == admission_status.WAITING
    return is_waiting and not admission_status.charged(job)


def state_of(job: TorchrunJob) -> JobState:
    """Return the state of a job, as a queue counts it."""
    if job.status.phase in TERMINAL:
        return "ended"
    if job.status.phase == "Running":
        return "running"
    admitted = any(c.type == "Admitted" and c.status == "True" for c in job.status.conditions)
    return "admitted" if admitted or needs_queue(job) else "pending"


def count_jobs(jobs: tuple[TorchrunJob, ...]) -> QueueJobs:
    """Count the jobs that have not finished, by state."""
    states = [state_of(job) for job in jobs]
    return QueueJobs(
        pending=states.count("pending"),
        admitted=states.count("admitted"),
        running=states.count("running"),
    )


def choose_scheduler(observed: ObservedQueue) -> Choice | None:
    """Return the gang scheduler of jobs that name none themselves; None while it is unknown."""
    if observed.installed is None:
        return None
    try:
        return choose(observed.queue, observed.installed)
    except InvalidSpecError:
        return None
