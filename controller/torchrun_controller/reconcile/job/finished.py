"""A job that has finished: its leftovers, its time to live, and what its status learns later."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import TORCHRUN_JOBS
from torchrun_api.kinds.status import TERMINAL, TorchrunJobStatus
from torchrun_controller.reconcile.gang import checkpoints, cleanup, gang, headway
from torchrun_controller.reconcile.gang.failures import choose_cause, find_root_cause
from torchrun_controller.reconcile.gang.state import failure_reason
from torchrun_controller.reconcile.job import dependencies, progress, refusals
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.decisions import DecisionWrites
from torchrun_controller.reconcile.job.status import count_beside_head, own_part
from torchrun_controller.reconcile.job.writes import build_plan
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, update
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang, RefusedWrites
from torchrun_controller.reconcile.model.plan import Delete, Plan
from torchrun_controller.reconcile.model.times import soonest, without_future_end
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability
from torchrun_controller.reconcile.workspace.sync_pods import end_preparations

ALREADY_FINISHED = Reason(
    "AlreadyFinished", "The job has already finished. spec.suspend has no effect."
)


def job_finished(assessment: Assessment) -> Plan | None:
    """Keep the phase of a finished job: its pods end, and it is deleted after its time to live.

    A job whose end nothing waits for keeps its completionTime, also if it is in the future.
    """
    observed, now = assessment.observed, assessment.now
    if observed.job.status.phase not in TERMINAL:
        return None
    past_job = without_future_end(observed.job, now)
    deletes, seconds_left = _clean_up(replace(observed, job=past_job), assessment.reliability, now)
    job = observed.job if seconds_left is None else past_job
    composed = _compose(job, observed.gang, observed.refused, now)
    return build_plan(
        assessment, DecisionWrites(deletes=deletes), composed, requeue_after=seconds_left
    )


def _clean_up(
    observed: Observed, policy: ResolvedReliability, now: datetime
) -> tuple[tuple[Delete, ...], float | None]:
    """Delete what a finished job leaves running, and the job itself after its time to live.

    A TTL on the child Job would delete the Job, and the next reconcile would train again. So the
    TorchrunJob is deleted, with all that it owns, once the jobs that depend on it have recorded how
    it ended: the status of a job that is gone cannot be read.
    """
    status, meta = observed.job.status, observed.job.metadata
    pod_deletes, wait = _end_running_pods(observed.job, observed.gang, policy, now)
    deletes = (*end_preparations(observed.workspace), *pod_deletes)
    if policy.time_to_live is None or status.completion_time is None:
        return deletes, wait
    seconds_left = (policy.time_to_live - (now - status.completion_time)).total_seconds()
    if seconds_left > 0:
        return deletes, soonest(seconds_left, wait)
    if not dependencies.have_recorded(observed.dependents, observed.job):
        return deletes, wait
    return (Delete.of(TORCHRUN_JOBS, meta, resource_version=meta.resource_version),), None


def _end_running_pods(
    job: TorchrunJob,
    observed_gang: ObservedGang,
    policy: ResolvedReliability,
    now: datetime,
) -> tuple[tuple[Delete, ...], float | None]:
    """Return deletions and a wait: workers of a succeeded head have a grace period to exit."""
    status, completed_job = job.status, gang.find_completed_job(observed_gang)
    has_successor = completed_job is not None and completed_job is not observed_gang.current_job
    if status.phase != "Succeeded" or has_successor:
        return cleanup.end_survivors(job, observed_gang), None
    workers = cleanup.end_workers(observed_gang)
    end_time = status.completion_time or now
    seconds_left = policy.grace_seconds - (now - end_time).total_seconds()
    return ((), seconds_left) if workers and seconds_left > 0 else (workers, None)


def _compose(
    job: TorchrunJob, gang: ObservedGang, refused: RefusedWrites, now: datetime
) -> TorchrunJobStatus:
    """Return the status of a finished job: with a better root cause, or a late suspension."""
    status = _show_last_report(_recount_workers(_refine_failure(job, gang), gang), gang, now)
    known = replace(gang, checkpoints=checkpoints.find_known(job.status, gang))
    status = checkpoints.record(status, job.status, known, now, is_running=False)
    late_suspension = (
        ConditionUpdate("Suspended", "False", ALREADY_FINISHED) if job.spec.suspend else None
    )
    warning = refusals.build_condition(refused, ())
    updates = [condition for condition in (late_suspension, warning) if condition is not None]
    replaced_types = {refusals.CONDITION, *(condition.type for condition in updates)}
    conditions = [
        *(
            c
            for c in status.conditions
            if c.type not in replaced_types and c.reason != ALREADY_FINISHED.reason
        ),
        *update(status.conditions, updates, job.metadata.generation, now),
    ]
    return own_part(replace(status, conditions=tuple(conditions)))


def _show_last_report(
    status: TorchrunJobStatus, gang: ObservedGang, now: datetime
) -> TorchrunJobStatus:
    """Return the status with the last progress: stopped ranks may report until they end."""
    start = headway.ranks_start(status, gang, status.attempts)
    last_report = progress.choose_progress(
        status.progress, gang.progress, now, ranks_start=start, has_ended=True
    )
    return replace(status, progress=last_report)


def _recount_workers(status: TorchrunJobStatus, gang: ObservedGang) -> TorchrunJobStatus:
    """Return the status with the workers that run on, after their head or after a deadline.

    The cache of the pods may be older than that of the Jobs, and lack the head's success.
    """
    counts, gangs = status.workers, gang.child_jobs
    if counts is None or not gangs:
        return status
    if status.phase != "Succeeded":
        if not counts.running or any(map(alive, gang.workers)):
            return status
        stopped = replace(counts, running=0, ready=0)
        return replace(status, workers=stopped, workers_status=f"0/{status.num_nodes} ready")
    is_settled = counts.succeeded > 0 and not counts.running
    if is_settled or not head_and_workers.has_head(gangs[-1]):
        return status
    workers = count_beside_head(gang)
    summary = f"{workers.ready}/{head_and_workers.nodes_of(gangs[-1])} ready"
    return replace(status, workers=workers, workers_status=summary)


def _refine_failure(job: TorchrunJob, gang: ObservedGang) -> TorchrunJobStatus:
    """Return the status with a better root cause, if a pod that ended later shows one."""
    status = job.status
    later = find_root_cause(gang.workers) if status.phase == "Failed" else None
    failure = None if later is None else choose_cause(status.last_failure, later.details)
    if failure is None or failure == status.last_failure:
        return status
    # The cause of one failure does not say why the job ended.
    if status.reason == headway.NO_PROGRESS:
        return replace(status, last_failure=failure)
    why = failure_reason(failure)
    conditions = tuple(
        replace(c, reason=why.reason, message=why.message) if c.type == "Failed" else c
        for c in status.conditions
    )
    return replace(
        status,
        last_failure=failure,
        reason=why.reason,
        message=why.message,
        conditions=conditions,
    )
