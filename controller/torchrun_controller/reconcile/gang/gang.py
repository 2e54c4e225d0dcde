"""A gang: whether its child Job exists, its records, and the Jobs of the next one."""

from datetime import datetime

import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Job
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import JOBS
from torchrun_api.kinds.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang import checkpoints, fence, headway
from torchrun_controller.reconcile.gang.departure import MACHINE_LEAVING
from torchrun_controller.reconcile.gang.failures import CreationCause
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model.conditions import Reason, find_true
from torchrun_controller.reconcile.model.observed import (
    Defaults,
    Observed,
    ObservedGang,
    RefusedWrites,
    decode_json,
)
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.model.times import seconds_of_gang
from torchrun_controller.reconcile.objects.child_job import child_job, worker_template
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.placement import (
    add_preference,
    nodes_with_checkpoints,
    prefer_checkpoint_nodes,
)
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, of_head
from torchrun_controller.reconcile.workspace.reload import annotate_template

# Ends of a gang that is replaced by one of another size.
BY_THE_USER, SHRINKING = "Resizing", "Shrinking"
RESIZES = frozenset({BY_THE_USER, SHRINKING})
# Ends of a gang that runs and is replaced.
REPLACEMENTS = RESIZES | {MACHINE_LEAVING}
AVOIDANCE_WEIGHT = 100


def exists(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether the child Job of the present attempt exists. The end of an older one is recorded."""
    jobs = gang.child_jobs
    return bool(jobs) and attempt_of(jobs[-1]) >= job.status.attempt


def was_created(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether a gang was ever created. After that, dependencies no longer matter."""
    return job.status.workers is not None or bool(gang.child_jobs)


def has_ended(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether every pod of the last gang is seen to have ended, or there never was a gang.

    A missing pod proves nothing: the cache of pods may lag behind, with the Job already gone. The
    Job controller sets the condition Failed only after all pods have ended (Kubernetes 1.31,
    KEP-3939).
    """
    if not was_created(job, gang):
        return True
    if not exists(job, gang) or any(alive(pod) for pod in gang.workers):
        return False
    all_seen = len(gang.workers) >= head_and_workers.nodes_of(gang.current_job)
    return all_seen or head_and_workers.have_all_failed(gang)


def is_recorded(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether the status has the number and the counts of the newest child Job."""
    status = job.status
    return status.workers is not None and attempt_of(gang.current_job) <= status.attempt


def current_counts(job: TorchrunJob, gang: ObservedGang) -> Counts:
    """Return the counts of the status, or of a child Job that is newer than the status."""
    status = job.status
    recorded_counts = Counts(status.restarts, status.disruptions)
    if not gang.child_jobs or attempt_of(gang.current_job) <= status.attempt:
        return recorded_counts
    annotations = gang.current_job.metadata.annotations
    return Counts(
        *(
            names.number_in(count, most=names.MOST_GANGS)
            for count in (annotations.restarts, annotations.disruptions)
        )
    )


def accepted_generation(job: TorchrunJob, gang: ObservedGang) -> int:
    """Return the generation of the spec of the last gang, from the status or a newer child Job."""
    recorded = job.status.accepted_generation
    if not gang.child_jobs:
        return recorded
    return names.number_in(gang.current_job.metadata.annotations.generation, recorded)


def has_new_spec(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether no gang was created from this spec yet: the rules for new jobs apply to it."""
    return accepted_generation(job, gang) != job.metadata.generation


def unrecorded_ends(job: TorchrunJob, gang: ObservedGang) -> tuple[Attempt, ...]:
    """Return the attempts before the present one whose end is not in the status.

    There are several if controllers died one after the other before they wrote a status.
    """
    attempt = job.status.attempt
    causes = [_cause(child) for child in gang.child_jobs if attempt_of(child) > attempt]
    return tuple(_to_attempt(cause) for cause in causes if cause is not None)


def unrecorded_failure(job: TorchrunJob, gang: ObservedGang) -> LastFailure | None:
    """Return the failure of the last of these attempts."""
    child = gang.current_job
    cause = _cause(child) if attempt_of(child) > job.status.attempt else None
    return None if cause is None else cause.failure


def _to_attempt(cause: CreationCause) -> Attempt:
    fields = msgspec.structs.asdict(cause)
    del fields["failure"]
    return Attempt(**fields)


def _cause(child: Job) -> CreationCause | None:
    return decode_json(child.metadata.annotations.cause, CreationCause)


def latest_attempt(job: TorchrunJob, gang: ObservedGang) -> int:
    """Return the number of the last gang that was created, -1 before the first."""
    recorded_number = -1 if job.status.workers is None else job.status.attempt
    return max([recorded_number, *map(attempt_of, gang.child_jobs)])


def next_attempt(job: TorchrunJob, gang: ObservedGang, refused: RefusedWrites) -> int:
    """Return the number for a new gang: the first, or one more than the last that was created.

    A number whose Job name is taken by a foreign Job is skipped.
    """
    status = job.status
    numbers = [attempt_of(child) for child in (*gang.child_jobs, *gang.worker_jobs)]
    numbers += stale_attempts(job, gang)
    if status.workers is None and not numbers:
        return status.attempt
    recorded_numbers = [attempt.number for attempt in status.attempts]
    attempt = max([status.attempt, *numbers, *recorded_numbers]) + 1
    taken_names = {c.name for c in refused.conflicts if c.resource == JOBS.resource}
    name = job.metadata.name
    while not taken_names.isdisjoint(
        (names.child_job(name, attempt), names.workers_job(name, attempt))
    ):
        attempt += 1
    return attempt


def stale_attempts(job: TorchrunJob, gang: ObservedGang) -> list[int]:
    """Return the numbers of gangs that only their pods show.

    The Job was deleted before the status recorded it, or the cache of Jobs is behind that of pods.
    """
    return [attempt_of(p) for p in gang.stale_pods if not fence.of_earlier_job(job, gang, p)]


def find_completed_job(gang: ObservedGang) -> Job | None:
    """Return the child Job that is Complete. It may be an older one than the present."""
    return next((job for job in gang.child_jobs if is_complete(job)), None)


def is_complete(child: Job) -> bool:
    """Whether the Job has the condition Complete."""
    return find_true(child.status.conditions, "Complete") is not None


def record_end(
    job: TorchrunJob,
    gang: ObservedGang,
    why: Reason,
    now: datetime,
    *,
    ran_until: datetime,
    counted: bool,
    node: str = "",
) -> Attempt:
    """Return the record of the present gang as an ended attempt; `node` is where it failed."""
    child, status = gang.current_job, job.status
    number = attempt_of(child)
    start = headway.ranks_start(status, gang, status.attempts)
    seconds = seconds_of_gang(status, ran_until) if number == status.attempt else 0.0
    return Attempt(
        number=number,
        node=node,
        start_time=child.metadata.creation_timestamp,
        end_time=now,
        running_seconds=round(seconds),
        step=headway.newest_step(status, gang.progress, start),
        checkpoint_step=headway.newest_saved(gang),
        counted=counted,
        reason=why.reason,
        message=why.message[:512],
    )


def roles_of(run: ResolvedSpec) -> tuple[str, ...]:
    """Return the roles of the Jobs of a gang. The head is the last, see `head_and_workers`."""
    return ("",) if run.size.head is None else (names.WORKER, names.HEAD)


def build_child_jobs(
    observed: Observed,
    run: ResolvedSpec,
    attempt: int,
    defaults: Defaults,
    *,
    history: JsonObject,
    may_start: bool,
    environment: Environment | None,
    avoided_hostnames: tuple[str, ...],
) -> tuple[Apply, ...]:
    """Return the Jobs of one attempt, with the machine preferences of their pods.

    `history` are their annotations, see `history_annotations`. With `may_start` the ranks start at
    once. Without it, and always in a gang with a head, they wait for the annotation
    torchrun.ai/start of their pods.

    Raises:
        InvalidSpecError: as `worker_template` does.
    """
    job, queue = observed.job, observed.queue
    assert queue is not None
    jobs = []
    checkpoint_nodes = nodes_with_checkpoints(job, observed.gang)
    for role in roles_of(run):
        role_spec = of_head(run, job, queue) if role == names.HEAD else run
        start = str(attempt) if may_start and not role else ""
        template = worker_template(
            *(job, queue, role_spec, environment, attempt, start, defaults, role),
            checkpoints=checkpoints.annotate(observed.gang.checkpoints),
        )
        template = add_preference(template, "NotIn", avoided_hostnames, AVOIDANCE_WEIGHT)
        template = prefer_checkpoint_nodes(template, role_spec, checkpoint_nodes, observed.cluster)
        template = annotate_template(template, observed.job, observed.workspace)
        jobs.append(child_job(job, role_spec, attempt, template, history, role))
    return tuple(jobs)


def history_annotations(
    job: TorchrunJob,
    attempt: int,
    counts: Counts,
    previous_end: Attempt | None,
    shrunk_from: int | None,
) -> JsonObject:
    """Return the facts for the annotations of the Jobs that a lost status write must not lose."""
    annotations: JsonObject = {}
    if attempt:
        annotations = {
            names.RESTARTS: str(counts.restarts),
            names.DISRUPTIONS: str(counts.disruptions),
        }
    if attempt and previous_end is not None:
        annotations[names.CAUSE] = msgspec.json.encode(previous_end).decode()
    annotations[names.GENERATION] = str(job.metadata.generation)
    if shrunk_from is not None:
        annotations[names.WANTED_NODES] = str(shrunk_from)
    return annotations
