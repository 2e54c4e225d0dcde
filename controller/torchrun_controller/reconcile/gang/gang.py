"""The gang of the present attempt: whether its child Job exists, its state, and its records."""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from torchrun_api import names
from torchrun_api.core import Job, Node
from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import JOBS
from torchrun_api.status import Attempt, LastFailure, UnfencedWorker
from torchrun_controller.reconcile.gang import (
    deletion,
    fence,
    gate,
    job_failure,
    peer_loss,
    suspension,
)
from torchrun_controller.reconcile.gang.failures import (
    POD_DELETED,
    Cause,
    Failure,
    find_root_cause,
    node_failure,
)
from torchrun_controller.reconcile.gang.restarts import INTENDED_ENDS, Counts
from torchrun_controller.reconcile.model import decode
from torchrun_controller.reconcile.model.attempts import whole_attempts
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import count_of, pods_are, sentence
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang, RefusedWrites
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.times import seconds_of_gang
from torchrun_controller.reconcile.pods import head_and_workers, waiting
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    count_scheduled,
    count_workers,
)
from torchrun_controller.reconcile.schedulers import groups
from torchrun_controller.reconcile.workspace import delivery

# Ends of a gang that is replaced by one of another size.
BY_THE_USER, SHRINKING = "Resizing", "Shrinking"
RESIZES = frozenset({BY_THE_USER, SHRINKING})
STARTING = "WorkersStarting"  # the reason of a gang without trouble whose pods do not all run


class GangState(msgspec.Struct, frozen=True):
    """The state of a gang. `seconds_left`: until a failure counts without a better cause.

    `stopped` is since when not all pods run, although the status may say so: no controller may have
    seen it.
    """

    state: State
    why: Reason
    failure: Failure | None = None
    seconds_left: float | None = None
    stopped: datetime | None = None


def exists(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether the child Job of the present attempt exists. The end of an older one is recorded."""
    jobs = gang.child_jobs
    return bool(jobs) and attempt_of(jobs[-1]) >= job.status.attempt


def was_created(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether a gang was ever created. After that, queue and dependencies no longer matter."""
    return job.status.workers is not None or bool(gang.child_jobs)


def has_ended(job: TorchrunJob, gang: ObservedGang) -> bool:
    """Whether every pod of the last gang is seen to have ended, or there never was a gang.

    A missing pod proves nothing: the cache of pods may lag behind, with the Job already gone. A
    cache that shows the pods of the next gang shows all earlier changes of older pods. The Job
    controller sets the condition Failed only after all pods have ended (Kubernetes 1.31, KEP-3939).
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


def _to_attempt(cause: Cause) -> Attempt:
    fields = msgspec.structs.asdict(cause)
    del fields["failure"]
    return Attempt(**fields)


def _cause(child: Job) -> Cause | None:
    return decode.read(child.metadata.annotations.cause, Cause)


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
    return any((c.type, c.status) == ("Complete", "True") for c in child.status.conditions)


def evaluate_state(
    observed: Observed, unfenced: tuple[UnfencedWorker, ...], now: datetime
) -> GangState:
    """Return the state of the gang of the present attempt; `unfenced` may keep its gate closed.

    The condition of the Job decides on success: some succeeded pods prove nothing about the others.
    Where a head has a Job of its own, the Job of the workers matters only for failures. A failure
    counts from the first failed pod on, well before the Job is Failed. A pod that lost a peer waits
    a moment for the failure of that peer, a deleted pod for Kueue's suspension of the Job.
    """
    job, gang, nodes = observed.job, observed.gang, observed.cluster.nodes
    completed_job = find_completed_job(gang)
    if completed_job is not None:
        size = head_and_workers.nodes_of(completed_job)
        message = f"{size} of {count_of(size, 'pod')} succeeded."
        if head_and_workers.has_head(completed_job):
            message = "The head succeeded."
        stopped = _time_of(completed_job, "Complete")
        return GangState(State.GANG_SUCCEEDED, Reason("Completed", message), stopped=stopped)
    child = gang.current_job
    deletion_failure = deletion.find_deletion(job, gang)
    if head_and_workers.head_has_succeeded(gang) and not child.metadata.terminating:
        return GangState(*_progress(observed, unfenced, now))
    failed_job = head_and_workers.find_failed_job(gang)
    if failed_job is None and deletion_failure is None:
        loss, seconds_left = suspension.find_loss(gang, unfenced, now)
        if loss is not None:
            why = failure_reason(loss.details)
            times = (loss.details.time, _time_of(child, "Suspended"))
            stopped = min((time for time in times if time is not None), default=None)
            return GangState(State.GANG_FAILED, why, loss, stopped=stopped)
        if child.spec.suspend:
            # The Job controller deletes the pods, which is not a failure.
            return GangState(
                *_suspension(job, gang),
                stopped=_time_of(child, "Suspended"),
                seconds_left=seconds_left,
            )
    failure = _pod_failure(gang, nodes, now)
    if deletion_failure is not None and (
        failure is None or deletion.precedes(deletion_failure, failure)
    ):
        return _failed_state(deletion_failure)
    seconds_left = None
    if failure is not None:
        seconds_left = _cause_wait_left(gang, failure.details, now)
    elif failed_job is not None:
        # No pod shows why.
        recorded_workers = job.status.workers if is_recorded(job, gang) else None
        failure = job_failure.find_failure(gang, *failed_job, recorded_workers)
        seconds_left = job_failure.seconds_left(
            gang, failed_job[0], failure.details, recorded_workers, now
        )
    if failure is not None and seconds_left is None:
        return _failed_state(failure)
    return GangState(
        *_progress(observed, unfenced, now),
        seconds_left=seconds_left,
        stopped=None if failure is None else failure.details.time,
    )


def _failed_state(failure: Failure) -> GangState:
    details = failure.details
    return GangState(State.GANG_FAILED, failure_reason(details), failure, stopped=details.time)


def _time_of(child: Job, kind: str) -> datetime | None:
    """Return since when this condition of the Job is True."""
    conditions = (c for c in child.status.conditions if (c.type, c.status) == (kind, "True"))
    return next((c.last_transition_time for c in conditions), None)


def _cause_wait_left(gang: ObservedGang, failure: LastFailure, now: datetime) -> float | None:
    """Return the seconds to wait for a better cause than the failure of the first failed pod.

    Pods and Jobs have separate watches: the end of a pod may arrive before Kueue's suspension of
    its Job.
    """
    if failure.reason == POD_DELETED and groups.find_admitter(gang.current_job) is not None:
        return peer_loss.wait_left(failure, now)
    return peer_loss.peer_wait_left(failure, gang.workers, now)


def _pod_failure(
    gang: ObservedGang, nodes: Mapping[str, Node] | None, now: datetime
) -> Failure | None:
    """Return the root cause. On a lost node, the loss counts and not the status of the pod."""
    pods = head_and_workers.pods_since_resumption(gang)
    losses = {pod.metadata.uid: fence.unproven_loss(nodes, pod, now) for pod in pods}
    node_failures = tuple(
        node_failure(pod, loss.message, loss.since)
        for pod in pods
        if (loss := losses[pod.metadata.uid]) is not None
    )
    return find_root_cause(tuple(p for p in pods if losses[p.metadata.uid] is None), node_failures)


def _progress(
    observed: Observed, unfenced: tuple[UnfencedWorker, ...], now: datetime
) -> tuple[State, Reason]:
    """Return whether a gang without failures runs, or why it does not."""
    gang = observed.gang
    nodes = head_and_workers.nodes_of(gang.current_job)
    counts = count_workers(gang.workers, nodes)
    claims = delivery.mounted_claims(observed.job, gang, observed.workspace)
    jobs = head_and_workers.jobs_of(gang)
    problem = waiting.gang_reason(jobs, nodes, gang.workers, claims, observed.cluster.warnings)
    if problem is None and count_scheduled(gang.workers) < nodes:
        problem = groups.waiting_reason(gang)
    closed = gate.closed_reason(observed, unfenced, now)
    state = "running or completed" if counts.succeeded else "running"
    message = f"{pods_are(nodes - counts.pending, nodes)} {state}."
    if counts.pending == 0 and closed is None and gate.is_open(gang):
        # The ranks run, whatever another container of their pods waits for.
        note = f" {problem.message}" if problem is not None else ""
        return State.GANG_RUNNING, Reason("WorkersRunning", message + note)
    why = problem or closed
    if why is not None:
        return State.GANG_STARTING, why
    cause = _restart_cause(observed.job, gang)
    if cause is not None:
        cause_text = f"Attempt {cause.number} ended: {sentence(cause.message)}"
        return State.GANG_STARTING, Reason("Restarting", f"{message} {cause_text}")
    return State.GANG_STARTING, Reason(STARTING, message)


def _restart_cause(job: TorchrunJob, gang: ObservedGang) -> Attempt | None:
    """Return the failed attempt that the present gang replaces; None if it replaces none."""
    number = attempt_of(gang.current_job)
    ends = whole_attempts(job.status.attempts)
    earlier_attempts = [attempt for attempt in ends if attempt.number < number]
    last_attempt = max(earlier_attempts, key=lambda attempt: attempt.number, default=None)
    return None if last_attempt is None or last_attempt.reason in INTENDED_ENDS else last_attempt


def _suspension(job: TorchrunJob, gang: ObservedGang) -> tuple[State, Reason]:
    """Return the state of a suspended child Job: its gang scheduler or a user has suspended it."""
    child, status = gang.current_job, job.status
    name, admitter = child.metadata.name, groups.find_admitter(child)
    refusal = groups.waiting_reason(gang)
    has_run = status.phase in ("Running", "Preempted") and attempt_of(child) == status.attempt
    if admitter is not None and not has_run:
        message = f"Job {name} is waiting for admission by {admitter.api.title}."
        wait_reason = Reason(admitter.waiting_reason, message)
        return State.GANG_STARTING, Reason(
            wait_reason.reason, refusal.message
        ) if refusal else wait_reason
    author = f" by {admitter.api.title}" if admitter is not None else ""
    suffix = f" {refusal.message}" if refusal else ""
    message = f"Job {name} is suspended{author}. The pods start again when it is resumed.{suffix}"
    return State.GANG_SUSPENDED, Reason("JobSuspended", message)


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
    seconds = seconds_of_gang(status, ran_until) if number == status.attempt else 0.0
    return Attempt(
        number=number,
        node=node,
        start_time=child.metadata.creation_timestamp,
        end_time=now,
        running_seconds=round(seconds),
        counted=counted,
        reason=why.reason,
        message=why.message[:512],
    )


def failure_reason(failure: LastFailure) -> Reason:
    """Return the root cause in a line."""
    parts = [
        f"rank {failure.rank}" if failure.rank is not None else "",
        f"node {failure.node}" if failure.node and failure.node not in failure.message else "",
        f"signal {failure.signal}" if failure.signal else "",
        f"exit code {failure.exit_code}" if failure.exit_code is not None else "",
    ]
    facts = ", ".join(part for part in parts if part)
    message = f"{failure.message.removesuffix('.')} ({facts})" if facts else failure.message
    return Reason(failure.reason, sentence(message))
