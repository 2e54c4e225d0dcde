"""Input and output of the reconcile of one queue, as frozen values, and what its jobs need."""

from typing import Literal, TypeAlias

from msgspec import Struct

from torchrun_api.kinds.admission import QueueJobs
from torchrun_api.kinds.extras import KaiQueue
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.reconcile.model.conditions import ADMITTED, find_true
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.model.phases import GANG_PHASES
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event
from torchrun_controller.reconcile.schedulers.table import Choice, choose
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

NOT_SYNCED = "the cache is not synced yet"
JobState: TypeAlias = Literal["pending", "admitted", "running", "ended"]


class TemplateCheck(Struct, frozen=True):
    """The API server's answer to the dry run of a Job from the template of this generation.

    `accepted` is "Unknown" if the controller lacks the permission to try.
    """

    generation: int
    accepted: Literal["True", "False", "Unknown"]
    message: str = ""


class ObservedQueue(Struct, frozen=True, kw_only=True):
    """The present state of one queue.

    `jobs` are those of the queue. `kai` are all KAI queues by name; None while unknown, for the
    reason `kai_problem`. `kai_users` are the other TorchrunQueues that name a KAI queue, deleted
    ones included. `refused` has the message of each refused write, by resource and name.
    `namespace` is the watched one, "" for all.
    """

    queue: TorchrunQueue
    jobs: tuple[TorchrunJob, ...] = ()
    installed: Installed | None = None
    kai: dict[str, KaiQueue] | None = None
    kai_problem: str = NOT_SYNCED
    kai_users: tuple[TorchrunQueue, ...] = ()
    refused: dict[tuple[str, str], str] = {}
    template_check: TemplateCheck | None = None
    namespace: str = ""


class QueuePlan(Struct, frozen=True, kw_only=True):
    """The writes, in this order: applies, deletes, status, events.

    A `trial` comes alone: the controller sends it as a dry run, and calls reconcile again with the
    TemplateCheck. `status` is None if the present one is up to date.
    """

    trial: Apply | None = None
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status: TorchrunQueueStatus | None = None
    events: tuple[Event, ...] = ()


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
    admitted = find_true(job.status.conditions, ADMITTED) is not None
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
