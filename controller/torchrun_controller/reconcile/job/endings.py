"""The steps that stop a gang: deadline, suspension, preemption; the cleanup of finished jobs."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import Job, Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_controller.reconcile.gang import cleanup, fence, gang
from torchrun_controller.reconcile.gang.decision import Decision, History, Writes, soonest
from torchrun_controller.reconcile.gang.gate import find_orphans, orphan_advice
from torchrun_controller.reconcile.job import dependencies
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.running import decide_on_gang
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import count_of, list_names, sentence
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.model.times import deadline_left, find_end
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of, delete_job
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability
from torchrun_controller.reconcile.workspace.claims import release_terminating
from torchrun_controller.reconcile.workspace.delivery import is_serve_pod
from torchrun_controller.reconcile.workspace.sync_pods import end_preparations


def deadline_exceeded(assessment: Assessment) -> Decision | None:
    """Stop a job that has exceeded its deadline."""
    limit = assessment.reliability.deadline
    seconds_left = deadline_left(assessment.observed.job.status, limit, assessment.ran_until)
    if limit is None or seconds_left is None or seconds_left > 0:
        return None
    reliability = assessment.reliability
    message = f"The job ran for {limit.total_seconds():.0f} s ({reliability.deadline_set_by})."
    return decide_on_gang(
        assessment,
        State.DEADLINE_EXCEEDED,
        Reason("DeadlineExceeded", message),
        Writes(
            deletes=cleanup.end_survivors(
                assessment.observed.job,
                assessment.observed.gang,
                reliability.grace_seconds,
            )
        ),
    )


def suspended(assessment: Assessment) -> Decision | None:
    """Stop the pods, with a grace period for a checkpoint. PVCs stay."""
    observed = assessment.observed
    if not observed.job.spec.suspend:
        return None
    # A serve pod may have the only copy of the code, so it stays like the PVCs.
    helper_pods = (
        p
        for p in (*observed.workspace.sync_pods, *observed.workspace.setup_pods)
        if not is_serve_pod(p)
    )
    stop_decision = Decision(
        state=State.SUSPENDING,
        why=Reason("Suspending", ""),
        attempt=observed.job.status.attempt,
        history=_history(assessment),
        writes=Writes(deletes=end_preparations(observed.workspace, serving=False)),
    )
    cause = Reason("Suspended", "spec.suspend was set to true.")
    decision = stop(assessment, stop_decision, cause, *helper_pods)
    if decision is not None:
        return decision
    why = Reason("Suspended", "spec.suspend is true. Only the PVCs remain.")
    claim_name = names.workspace_claim(observed.job.metadata.name)
    writes = Writes(deletes=release_terminating(observed.workspace, claim_name))
    return replace(stop_decision, state=State.SUSPENDED, why=why, writes=writes)


def preempted(assessment: Assessment) -> Decision | None:
    """Stop the pods in the same way if the admission was revoked.

    The quota of the queue is released only once all pods have terminated.
    """
    message = admission_status.preempted(assessment.observed.job)
    if not message:
        return None
    stop_decision = Decision(
        state=State.PREEMPTING,
        why=Reason("Preempting", message),
        attempt=assessment.observed.job.status.attempt,
        history=_history(assessment),
    )
    why = Reason(admission_status.PREEMPTED, message)
    decision = stop(assessment, stop_decision, why)
    if decision is not None:
        return decision
    release_reason = Reason(why.reason, "No pod remains. See the condition Admitted.")
    answer = ConditionUpdate(admission_status.REQUESTED, "True", release_reason)
    return replace(stop_decision, state=State.PREEMPTED, why=why, conditions=(answer,))


def _history(assessment: Assessment) -> History:
    """Return the history of a gang that was deleted, else the counts and failed rounds alone.

    An existing gang ends by the suspension or preemption, even if its pods failed meanwhile.
    """
    if assessment.gang is None and assessment.end is not None:
        return assessment.end.history
    history = assessment.history
    rounds = tuple(end for end in history.ends if end.round is not None)
    return replace(history, ends=rounds, failure=assessment.new_restarts.failure)


def stop(
    assessment: Assessment, stop_decision: Decision, cause: Reason, *helper_pods: Pod
) -> Decision | None:
    """Return the decision until no pod of the gang and no helper pod runs; None after that.

    First the gang ends for `cause`: its end is recorded and its Jobs are deleted. Then its pods
    terminate. `stop_decision` has what both have in common.
    """
    if _has_gang_to_end(assessment):
        return _end_gang(assessment, stop_decision, cause)
    return _wait_for_pods(assessment, stop_decision, *helper_pods)


def _has_gang_to_end(assessment: Assessment) -> bool:
    """Whether a Job is to be deleted, or the status does not have all that Job and pods show."""
    job, observed_gang = assessment.observed.job, assessment.observed.gang
    if not observed_gang.child_jobs:
        return False
    end = find_end(job.status.attempts, attempt_of(observed_gang.current_job))
    return end is None or bool(_live_jobs(observed_gang)) or not _is_recorded(assessment)


def _live_jobs(observed_gang: ObservedGang) -> list[Job]:
    return [child for child in observed_gang.child_jobs if not child.metadata.terminating]


def _is_recorded(assessment: Assessment) -> bool:
    """Whether the status has the number and the counts of the gang, and its workers on lost nodes.

    Only the Job has the number and the counts, and only the pods show which workers may still run
    on lost nodes. Both stay until the status has recorded that.
    """
    job, observed_gang = assessment.observed.job, assessment.observed.gang
    has_unrecorded = fence.has_unrecorded(job, assessment.unfenced)
    return not has_unrecorded and gang.is_recorded(job, observed_gang)


def _end_gang(assessment: Assessment, stop_decision: Decision, cause: Reason) -> Decision:
    """Return the decision that records the end of the gang for `cause`, and deletes its Jobs."""
    observed = assessment.observed
    child = observed.gang.current_job
    history = replace(
        stop_decision.history,
        ends=(*gang.unrecorded_ends(observed.job, observed.gang), *stop_decision.history.ends),
    )
    decision = replace(
        stop_decision,
        why=_extend(
            stop_decision.why,
            f"The pods of Job {child.metadata.name} receive SIGTERM and terminate.",
        ),
        attempt=max(attempt_of(child), stop_decision.attempt),
        history=history,
    )
    if not _is_recorded(assessment):
        return decision
    end = gang.record_end(
        observed.job,
        observed.gang,
        cause,
        assessment.now,
        ran_until=assessment.ran_until,
        counted=False,
    )
    deletes = tuple(delete_job(job) for job in _live_jobs(observed.gang))
    return replace(
        decision,
        writes=replace(decision.writes.and_also(deletes=deletes), status_before_deletes=True),
        history=replace(history, ends=(*history.ends, end)),
    )


def _wait_for_pods(
    assessment: Assessment, stop_decision: Decision, *helper_pods: Pod
) -> Decision | None:
    """Return the decision while pods of the gang or helper pods terminate; None once all have."""
    observed, now = assessment.observed, assessment.now
    # A pod on a lost node never reports its end. The status records workers, and the fence waits
    # for them. The next setup pod waits for the one before it.
    pods = (*observed.gang.workers, *observed.gang.stale_pods, *helper_pods)
    reachable = (pod for pod in pods if nodes.find_loss(observed.cluster.nodes, pod, now) is None)
    running_pods = [pod for pod in reachable if alive(pod)]
    if not running_pods:
        return None
    names = list_names(pod.metadata.name for pod in running_pods)
    message = f"Waiting for {count_of(len(running_pods), 'pod')} to terminate: {names}."
    advice = orphan_advice(
        tuple(pod for pod in find_orphans(observed.gang, observed.refused) if pod in running_pods)
    )
    return replace(
        stop_decision, why=_extend(stop_decision.why, f"{message} {advice}" if advice else message)
    )


def _extend(why: Reason, message: str) -> Reason:
    return Reason(why.reason, f"{sentence(why.message)} {message}" if why.message else message)


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


def clean_up(
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
