"""The gang of the present attempt: which child Job it is and how it stands."""

from datetime import datetime, timedelta

import msgspec

from torchrun_api import names
from torchrun_api.core import Job, Pod
from torchrun_api.kinds import JOBS
from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang import deletion, fence, gate, peer_loss
from torchrun_controller.reconcile.gang.failures import (
    POD_DELETED,
    Cause,
    Failure,
    node_lost,
    root_cause,
)
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model import decode
from torchrun_controller.reconcile.model.conditions import Reason, find_condition
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.model.times import seconds_of_gang
from torchrun_controller.reconcile.pods import head_and_workers, lifecycle, waiting
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    count_scheduled,
    count_workers,
    delete_pod,
)
from torchrun_controller.reconcile.schedulers import groups
from torchrun_controller.reconcile.workspace import delivery

# Seconds for survivors of a failed gang: their peers are gone, there is nothing left to save.
SURVIVOR_GRACE = 5
# For the ends of pods that their Job already tells of: watches lag, and these tell the root cause.
# One that fails again and again is tried every 60 s at the latest.
UNHEARD = timedelta(seconds=70)
KEPT_JOBS = 5
# Ends of a gang that made room for one of another size.
BY_THE_USER, SHRINKING, GROWING = "Resizing", "Shrinking", "Growing"
RESIZES = frozenset({BY_THE_USER, SHRINKING, GROWING})


def attempt_of(child: Job) -> int:
    """Number of the attempt, from its label."""
    return lifecycle.attempt_of(child.metadata)


def is_there(observed: Observed) -> bool:
    """Whether the Job of the present attempt is there; an older one's end has been dealt with."""
    jobs = observed.gang.child_jobs
    return bool(jobs) and attempt_of(jobs[-1]) >= observed.job.status.attempt


def has_been(observed: Observed) -> bool:
    """Whether a gang was ever made: what started goes on by what it started with."""
    return observed.job.status.workers is not None or bool(observed.gang.child_jobs)


def is_over(observed: Observed) -> bool:
    """Whether each pod of the last gang is seen to have ended, or there never was a gang.

    That none is seen proves nothing: a cache of pods that lags shows none of a gang whose Job is
    gone. Who sees the pods of the next gang has seen all that happened to older ones before.
    """
    if not has_been(observed):
        return True
    ended = sum(not alive(pod) for pod in observed.gang.workers)
    return is_there(observed) and ended >= head_and_workers.nodes_of(observed.gang.current_job)


def is_in_status(observed: Observed) -> bool:
    """Whether the status knows of the newest child Job: its number, and what it counts for."""
    status = observed.job.status
    return status.workers is not None and attempt_of(observed.gang.current_job) <= status.attempt


def counts_of(observed: Observed) -> Counts:
    """What was counted so far: by the status, or by a child Job that is newer than it."""
    status = observed.job.status
    known = Counts(status.restarts, status.disruptions)
    if not observed.gang.child_jobs or attempt_of(observed.gang.current_job) <= status.attempt:
        return known
    said = observed.gang.current_job.metadata.annotations
    return Counts(names.number_in(said.restarts), names.number_in(said.disruptions))


def ended_before(observed: Observed) -> tuple[Attempt, ...]:
    """The attempts before the present one of whose end the status has not heard.

    More than one where a leader that took over died as well before it could write a status.
    """
    known = observed.job.status.attempt
    causes = [_cause(child) for child in observed.gang.child_jobs if attempt_of(child) > known]
    return tuple(_attempt(cause) for cause in causes if cause is not None)


def failed_before(observed: Observed) -> LastFailure | None:
    """What that attempt failed of."""
    child = observed.gang.current_job
    cause = _cause(child) if attempt_of(child) > observed.job.status.attempt else None
    return None if cause is None else cause.failure


def _attempt(cause: Cause) -> Attempt:
    told = msgspec.structs.asdict(cause)
    del told["failure"]
    return Attempt(**told)


def _cause(child: Job) -> Cause | None:
    return decode.read(child.metadata.annotations.cause, Cause)


def next_attempt(observed: Observed) -> int:
    """Number for a new gang: the first, or one more than the last that was made.

    A later number whose name a foreign Job holds is skipped. Pods tell of a gang whose Job was
    deleted before the status knew it.
    """
    status = observed.job.status
    made = [attempt_of(child) for child in (*observed.gang.child_jobs, *observed.gang.worker_jobs)]
    own = (ghost for ghost in observed.gang.stale_pods if not fence.of_earlier_job(observed, ghost))
    made += [lifecycle.attempt_of(ghost.metadata) for ghost in own]
    if status.workers is None and not made:
        return status.attempt
    ended = [attempt.number for attempt in status.attempts]
    attempt = max([status.attempt, *made, *ended]) + 1
    taken = {c.name for c in observed.refused.conflicts if c.resource == JOBS.resource}
    job = observed.job.metadata.name
    while not taken.isdisjoint((names.child_job(job, attempt), names.workers_job(job, attempt))):
        attempt += 1
    return attempt


def completed(observed: Observed) -> Job | None:
    """The child Job that has succeeded; an older one may have while its successor was created."""
    return next((job for job in observed.gang.child_jobs if _is_complete(job)), None)


def _is_complete(child: Job) -> bool:
    return any((c.type, c.status) == ("Complete", "True") for c in child.status.conditions)


class GangState(msgspec.Struct, frozen=True):
    """How a gang stands; `left` are seconds until a failure is judged by its victim's word."""

    state: State
    why: Reason
    failure: Failure | None = None
    left: float | None = None


def find(observed: Observed, now: datetime) -> GangState:
    """How the gang stands.

    Success is the Job's own verdict: single pods that succeeded prove nothing of the others. Where
    a head has a Job of its own, that of the others has a say only in failures.
    Failure is taken from the first failed pod, well before the Job says so; a pod that only lost
    a peer waits a moment for the word of that peer, and one that was told to end for Kueue's.
    """
    succeeded = completed(observed)
    if succeeded is not None:
        nodes = head_and_workers.nodes_of(succeeded)
        all_of_them = f"{nodes} of {nodes} workers succeeded"
        message = "the head succeeded" if head_and_workers.has_head(succeeded) else all_of_them
        return GangState(State.GANG_SUCCEEDED, Reason("Completed", message))
    child = observed.gang.current_job
    nodes = head_and_workers.nodes_of(child)
    deleted = deletion.of_gang(observed)
    if head_and_workers.head_has_succeeded(observed.gang) and not child.metadata.terminating:
        return GangState(*_progress(observed, now))
    failed = head_and_workers.find_failed_job(observed.gang)
    if child.spec.suspend and failed is None and deleted is None:
        # Its pods are told to end, which is no failure of theirs.
        return GangState(*_suspended(observed))
    failure = _failure(observed, now)
    if deleted is not None and (failure is None or deletion.comes_before(deleted, failure)):
        return GangState(State.GANG_FAILED, why_failed(deleted.said), deleted)
    left = None if failure is None else _left(observed, failure.said, now)
    if left is not None:
        return GangState(*_progress(observed, now), left=left)
    if failure is None and failed is not None:
        # Its pods are gone without a word: somebody removed them.
        job, said = failed
        failure = Failure(
            said=LastFailure(
                reason=said.reason or "JobFailed",
                message=said.message or f"Job {job.metadata.name} failed",
                time=said.last_transition_time,
            ),
            disruption=len(observed.gang.workers) < nodes,
        )
        left = _unheard(observed, job, failure.said, now)
        if left is not None:
            return GangState(*_progress(observed, now), left=left)
    if failure is not None:
        return GangState(State.GANG_FAILED, why_failed(failure.said), failure)
    return GangState(*_progress(observed, now))


def _unheard(observed: Observed, job: Job, said: LastFailure, now: datetime) -> float | None:
    """Seconds for which the end of a pod may still be heard of that is shown as it was before.

    A Job fails only when all of its pods have ended. One that has never been seen to start may not
    have been heard of at all; one that has, and is shown no more, was removed.
    """
    its_own = (pod for pod in observed.gang.workers if pod.metadata.controlled_by(job.metadata.uid))
    lives = any(alive(pod) for pod in its_own)
    status, nodes = observed.job.status, head_and_workers.nodes_of(observed.gang.current_job)
    known = status.workers if is_in_status(observed) else None
    unseen = len(observed.gang.workers) < nodes and (known is None or known.pending > 0)
    return peer_loss.patience_left(said, now, UNHEARD) if lives or unseen else None


def _left(observed: Observed, said: LastFailure, now: datetime) -> float | None:
    """Seconds for which a better word may still come than that of the pod that failed first.

    Pods and Jobs are watched apart: that a pod ends may be heard of before Kueue has suspended its
    Job.
    """
    if said.reason == POD_DELETED and _by_kueue(observed.gang.current_job):
        return peer_loss.patience_left(said, now)
    return peer_loss.left(said, observed.gang.workers, now)


def _by_kueue(child: Job) -> bool:
    return child.metadata.annotations.gang == "kueue"


def _failure(observed: Observed, now: datetime) -> Failure | None:
    """The root cause; what others say in the name of a lost node's kubelet counts for nothing."""
    pods = _since_resumed(observed)
    losses = {pod.metadata.uid: fence.unproven_loss(observed, pod, now) for pod in pods}
    lost = tuple(
        node_lost(pod, loss.message, loss.since)
        for pod in pods
        if (loss := losses[pod.metadata.uid]) is not None
    )
    return root_cause(tuple(p for p in pods if losses[p.metadata.uid] is None), lost)


def _since_resumed(observed: Observed) -> tuple[Pod, ...]:
    """The workers but for those that a suspension of the child Job has told to end.

    The Job controller does not count these as failed either.
    """
    conditions = observed.gang.current_job.status.conditions
    suspended = find_condition(conditions, "Suspended")
    resumed = suspended.last_transition_time if suspended is not None else None
    if resumed is None:
        return observed.gang.workers

    def told_to_end(pod: Pod) -> bool:
        made, ends = pod.metadata.creation_timestamp, pod.metadata.deletion_timestamp
        return ends is not None and made is not None and made < resumed

    return tuple(pod for pod in observed.gang.workers if not told_to_end(pod))


def _progress(observed: Observed, now: datetime) -> tuple[State, Reason]:
    """Nothing failed: is it running, and if not, what does it wait for."""
    nodes = head_and_workers.nodes_of(observed.gang.current_job)
    counts = count_workers(observed.gang.workers, nodes)
    claims = delivery.mounted_claims(observed)
    jobs = head_and_workers.jobs_of(observed.gang)
    why = waiting.gang_reason(jobs, nodes, observed.gang.workers, claims, observed.cluster.warnings)
    if why is None and count_scheduled(observed.gang.workers) < nodes:
        why = groups.why_waiting(observed)
    why = why or gate.why_closed(observed, now)
    if why is not None:
        return State.GANG_STARTING, why
    if counts.pending == 0 and gate.is_open(observed):
        return State.GANG_RUNNING, Reason("WorkersRunning", f"{nodes} of {nodes} workers started")
    started = nodes - counts.pending
    return State.GANG_STARTING, Reason("WorkersStarting", f"{started} of {nodes} workers started")


def _suspended(observed: Observed) -> tuple[State, Reason]:
    """By Kueue, which has not admitted it yet or takes its place away, or by anybody."""
    child, status = observed.gang.current_job, observed.job.status
    name, by_kueue = child.metadata.name, _by_kueue(child)
    said = groups.why_waiting(observed)
    has_run = status.phase in ("Running", "Preempted") and attempt_of(child) == status.attempt
    if by_kueue and not has_run:
        waits = Reason("WaitingForKueue", f"Job {name} waits for its admission by Kueue")
        return State.GANG_STARTING, Reason(waits.reason, said.message) if said else waits
    whom = " by Kueue" if by_kueue else ""
    told = f": {said.message}" if said else ""
    message = f"Job {name} is suspended{whom}; it goes on when it is resumed{told}"
    return State.GANG_SUSPENDED, Reason("JobSuspended", message)


def end_survivors(observed: Observed, grace: int = SURVIVOR_GRACE) -> tuple[Delete, ...]:
    """Pods of the present gang that still run; `grace` in seconds.

    Where somebody has deleted a Job of the gang, its pods go or stay with that, as was asked for.
    """
    if observed.gang.child_jobs and head_and_workers.find_deleted_job(observed.job, observed.gang):
        return ()
    return end(observed.gang.workers, grace)


def end_stale_pods(observed: Observed) -> tuple[Delete, ...]:
    """Pods of ended gangs that nobody has told to end, as the process died in between."""
    resized = left_by_resize(observed)
    standing = (c for c in observed.gang.child_jobs[:-1] if not c.metadata.terminating)
    older = [child for child in standing if child not in resized]
    numbers = {attempt_of(child) for child in older}
    beside = (job for job in observed.gang.worker_jobs if attempt_of(job) in numbers)
    ended = {job.metadata.uid for job in (*older, *beside)}
    ours = (
        pod
        for pod in observed.gang.stale_pods
        if any(owner.controller and owner.uid in ended for owner in pod.metadata.owner_references)
    )
    return end(tuple(ours), SURVIVOR_GRACE)


def left_by_resize(observed: Observed) -> tuple[Job, ...]:
    """Jobs of gangs that a resize has replaced and not deleted, as the process died in between."""
    known = (
        *observed.job.status.attempts,
        *(ended_before(observed) if observed.gang.child_jobs else ()),
    )
    ends = {attempt.number: attempt.reason for attempt in known}
    older = (c for c in observed.gang.child_jobs[:-1] if not c.metadata.terminating)
    return tuple(
        child
        for child in older
        if ends.get(attempt_of(child)) in RESIZES and not _is_complete(child)
    )


def end(pods: tuple[Pod, ...], grace: int) -> tuple[Delete, ...]:
    """Those of the pods that still run and have not been told."""
    return tuple(
        delete_pod(pod, grace) for pod in pods if alive(pod) and not pod.metadata.terminating
    )


def delete(child: Job) -> Delete:
    """The child Job with its pods, which get their full grace period.

    Only as it was observed: one that has succeeded meanwhile is looked at again.
    """
    meta = child.metadata
    return Delete(
        kind=JOBS,
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        resource_version=meta.resource_version,
    )


def forget_oldest(observed: Observed) -> tuple[Delete, ...]:
    """Child Jobs of ended attempts, but for the last few."""
    return tuple(delete(child) for child in observed.gang.child_jobs[: -KEPT_JOBS + 1])


def record(
    observed: Observed, why: Reason, now: datetime, *, counted: bool, node: str = ""
) -> Attempt:
    """The present gang as an attempt that ended; `node` is that of its failure."""
    child, status = observed.gang.current_job, observed.job.status
    number = attempt_of(child)
    ran = seconds_of_gang(status, now) if number == status.attempt else 0.0
    return Attempt(
        number=number,
        node=node,
        start_time=child.metadata.creation_timestamp,
        end_time=now,
        running_seconds=round(ran),
        counted=counted,
        reason=why.reason,
        message=why.message[:512],
    )


def recorded(observed: Observed) -> Attempt | None:
    """The present gang's end, where the status has it already."""
    number = attempt_of(observed.gang.current_job)
    known = (a for a in observed.job.status.attempts if a.number == number)
    return next(known, None)


def why_failed(failure: LastFailure) -> Reason:
    """The root cause in a line."""
    parts = [
        f"rank {failure.rank}" if failure.rank is not None else "",
        f"node {failure.node}" if failure.node else "",
        f"signal {failure.signal}" if failure.signal else "",
        f"exit code {failure.exit_code}" if failure.exit_code is not None else "",
    ]
    facts = ", ".join(part for part in parts if part)
    return Reason(failure.reason, f"{failure.message} ({facts})" if facts else failure.message)
