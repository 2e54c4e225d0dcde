"""The steps that stop a gang: deadline, suspension, preemption, and a start that timed out."""

from collections.abc import Iterable
from datetime import timedelta
from itertools import takewhile

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Job, Pod
from torchrun_api.kinds.status import Attempt
from torchrun_controller.reconcile.gang import cleanup, fence, gang
from torchrun_controller.reconcile.gang.gate import find_orphans, orphan_advice
from torchrun_controller.reconcile.gang.restarts import START_TIMEOUT
from torchrun_controller.reconcile.job.assess import Assessment, History
from torchrun_controller.reconcile.job.decisions import (
    NO_WRITES,
    NOTHING,
    START_LIMIT,
    Decision,
    DecisionWrites,
    decide,
    seconds_to_start,
)
from torchrun_controller.reconcile.job.running import know_gang
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import count_of, list_names, sentence
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.times import deadline_left, find_end, whole_attempts
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of, delete_job
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.workspace.claims import release_terminating
from torchrun_controller.reconcile.workspace.delivery import is_serve_pod
from torchrun_controller.reconcile.workspace.sync_pods import end_preparations

LONGEST_POSTPONEMENT = timedelta(hours=8)


def deadline_exceeded(assessment: Assessment) -> Decision | None:
    """Stop a job that has exceeded its deadline."""
    job, policy = assessment.observed.job, assessment.reliability
    seconds_left = deadline_left(job.status, policy.deadline, assessment.ran_until)
    if policy.deadline is None or seconds_left is None or seconds_left > 0:
        return None
    message = f"The job ran for {policy.deadline.total_seconds():.0f} s ({policy.deadline_set_by})."
    deletes = cleanup.end_survivors(job, assessment.observed.gang, policy.grace_seconds)
    return decide(
        assessment,
        State.DEADLINE_EXCEEDED,
        Reason("DeadlineExceeded", message),
        know_gang(assessment),
        writes=DecisionWrites(deletes=deletes),
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
    history = _history(assessment)
    stopping = stop(
        assessment,
        State.SUSPENDING,
        Reason("Suspending", ""),
        cause=Reason("Suspended", "spec.suspend was set to true."),
        history=history,
        writes=DecisionWrites(deletes=end_preparations(observed.workspace, serving=False)),
        helper_pods=helper_pods,
    )
    if stopping is not None:
        return stopping
    why = Reason("Suspended", "spec.suspend is true. Only the PVCs remain.")
    claim_name = names.workspace_claim(observed.job.metadata.name)
    writes = DecisionWrites(deletes=release_terminating(observed.workspace, claim_name))
    return decide(assessment, State.SUSPENDED, why, history=history, writes=writes)


def preempted(assessment: Assessment) -> Decision | None:
    """Stop the pods in the same way if the admission was revoked.

    The quota of the queue is released only once all pods have terminated.
    """
    message = admission_status.preempted(assessment.observed.job)
    if not message:
        return None
    history = _history(assessment)
    why = Reason(admission_status.PREEMPTED, message)
    stopping = stop(
        assessment, State.PREEMPTING, Reason("Preempting", message), cause=why, history=history
    )
    if stopping is not None:
        return stopping
    release_reason = Reason(why.reason, "No pod remains. See the condition Admitted.")
    answer = ConditionUpdate(admission_status.REQUESTED, "True", release_reason)
    return decide(assessment, State.PREEMPTED, why, NOTHING, answer, history=history)


def _history(assessment: Assessment) -> History:
    """Return the history of a gang that was deleted, else the counts and failed rounds alone.

    An existing gang ends by the suspension or preemption, even if its pods failed meanwhile.
    """
    if assessment.gang is None and assessment.end is not None:
        return assessment.end.history
    history = assessment.history
    rounds = tuple(end for end in history.ends if end.round is not None)
    return replace(history, ends=rounds, failure=assessment.new_restarts.failure)


def start_timed_out(assessment: Assessment) -> Decision | None:
    """End a gang that somebody has to help to start, so that others can use its quota meanwhile.

    The next gang waits, twice as long after each start in a row that timed out, or until the user
    changes something. The status of a job that was suspended and resumed has another reason.
    """
    job, now = assessment.observed.job, assessment.now
    meta, status = job.metadata, job.status
    end = find_end(status.attempts, assessment.attempt)
    if end is not None and end.reason == START_TIMEOUT:
        cause = Reason(end.reason, end.message)
    elif assessment.blocked is None or seconds_to_start(assessment) > 0:
        return None
    else:
        minutes = START_LIMIT.total_seconds() / 60
        message = (
            f"The gang could not start within {minutes:.0f} minutes. {assessment.blocked.message}"
        )
        cause = Reason(START_TIMEOUT, message)
    stopping = stop(
        assessment, State.START_TIMED_OUT, cause, cause=cause, history=assessment.history
    )
    is_edited = status.observed_generation != meta.generation
    if stopping is not None or end is None or is_edited or status.reason != START_TIMEOUT:
        return stopping
    next_start = (end.end_time or now) + _postponement(status.attempts)
    if next_start <= now:
        return None
    message = (
        f"{sentence(cause.message)} The next gang requests admission at"
        f" {next_start:%H:%M} UTC, or once the spec is edited or the job suspended and resumed."
    )
    return decide(
        assessment,
        State.START_POSTPONED,
        Reason(START_TIMEOUT, message),
        writes=DecisionWrites(requeue_after=(next_start - now).total_seconds()),
    )


def _postponement(attempts: tuple[Attempt, ...]) -> timedelta:
    """Return the wait after a start that timed out: twice as long after each in a row."""
    ends = reversed(whole_attempts(attempts))
    in_a_row = list(takewhile(lambda end: end.reason == START_TIMEOUT, ends))
    return min(START_LIMIT * (1 << max(len(in_a_row) - 1, 0)), LONGEST_POSTPONEMENT)


def stop(
    assessment: Assessment,
    state: State,
    why: Reason,
    *,
    cause: Reason,
    history: History,
    writes: DecisionWrites = NO_WRITES,
    helper_pods: Iterable[Pod] = (),
) -> Decision | None:
    """Return the decision until no pod of the gang and no helper pod runs; None after that.

    First the gang ends for `cause`: its end is recorded, and then its Jobs are deleted. Then its
    pods terminate. Only the Job has the number and the counts of the gang, and only the pods show
    which workers may still run on lost machines: both stay until the status has recorded that.
    """
    job, observed_gang = assessment.observed.job, assessment.observed.gang
    if not _has_gang_to_end(assessment):
        message = _describe_running_pods(assessment, helper_pods)
        if not message:
            return None
        return decide(assessment, state, _extend(why, message), history=history, writes=writes)
    ends = (*gang.unrecorded_ends(job, observed_gang), *history.ends)
    if _is_recorded(assessment):
        end = gang.record_end(
            job,
            observed_gang,
            cause,
            assessment.now,
            ran_until=assessment.ran_until,
            counted=False,
        )
        ends += (end,)
        deletes = tuple(delete_job(child) for child in _live_jobs(observed_gang))
        writes = replace(writes.and_also(deletes=deletes), status_before_deletes=True)
    name = observed_gang.current_job.metadata.name
    message = f"The pods of Job {name} receive SIGTERM and terminate."
    history = replace(history, ends=ends)
    return decide(assessment, state, _extend(why, message), history=history, writes=writes)


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
    """Whether the status has the number and the counts of the gang, and its unfenced workers."""
    job, observed_gang = assessment.observed.job, assessment.observed.gang
    has_unrecorded = fence.has_unrecorded(job, assessment.unfenced)
    return not has_unrecorded and gang.is_recorded(job, observed_gang)


def _describe_running_pods(assessment: Assessment, helper_pods: Iterable[Pod]) -> str:
    """Return which pods of the gang and which helper pods are awaited; "" once all have ended."""
    observed, now = assessment.observed, assessment.now
    # A pod on a lost machine never reports its end. The status records workers, and the fence waits
    # for them. The next setup pod waits for the one before it.
    pods = (*observed.gang.pods, *helper_pods)
    reachable = (pod for pod in pods if nodes.find_loss(observed.cluster.nodes, pod, now) is None)
    running_pods = [pod for pod in reachable if alive(pod)]
    if not running_pods:
        return ""
    pod_names = list_names(pod.metadata.name for pod in running_pods)
    message = f"Waiting for {count_of(len(running_pods), 'pod')} to terminate: {pod_names}."
    advice = orphan_advice(
        tuple(pod for pod in find_orphans(observed.gang, observed.refused) if pod in running_pods)
    )
    return f"{message} {advice}" if advice else message


def _extend(why: Reason, message: str) -> Reason:
    return Reason(why.reason, f"{sentence(why.message)} {message}" if why.message else message)
