"""A gang is there: how it stands, and what follows when it fails or has another size."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_controller.reconcile.gang import backoff, gang, gate, halves
from torchrun_controller.reconcile.gang.decision import Decision, soonest
from torchrun_controller.reconcile.gang.failures import Failure
from torchrun_controller.reconcile.gang.restarts import (
    FailureAction,
    evaluate_failure_policy,
    why_final,
)
from torchrun_controller.reconcile.job import dependencies, elastic, refusals
from torchrun_controller.reconcile.job.advance import (
    QUEUE_FOUND,
    NextAttempt,
    advance,
    missing_checkpoints,
    missing_service,
)
from torchrun_controller.reconcile.job.ends import preempt, suspend
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.times import deadline_left
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, resolve_spec
from torchrun_controller.reconcile.workspace import claims, delivery, reload, sync_results
from torchrun_controller.reconcile.workspace import preparation as workspace


def watch(
    observed: Observed, policy: ResolvedReliability, now: datetime, defaults: Defaults
) -> Decision:
    """The gang of the present attempt: success first, then the user's word, then failure."""
    found = gang.find(observed, now)
    failure, run = found.failure, _resolved(observed)
    decision = Decision(
        state=found.state,
        why=found.why,
        attempt=gang.attempt_of(observed.child_jobs[-1]),
        run=run,
        queue=QUEUE_FOUND if observed.queue else None,
        workspace=workspace.said(observed, run),
        dependencies=dependencies.why_gang(observed),
        commit=sync_results.commit_of(observed, reload.running(observed)),
        counts=gang.counts_of(observed),
        ended=gang.ended_before(observed),
        failure=failure.said if failure else gang.failed_before(observed),
    )
    if found.state is State.GANG_SUCCEEDED:
        return decision
    left = deadline_left(observed.job.status, policy.deadline, now)
    if left is not None and left <= 0:
        return _timed_out(decision, observed, policy)
    if observed.job.spec.suspend:
        return suspend(observed, now)
    taken = admission_status.preempted(observed.job)
    if taken:
        return preempt(observed, taken, now)
    if failure is not None:
        return _after_failure(observed, decision, failure, policy, now, defaults)
    missing = missing_checkpoints(observed)
    lives = replace(
        decision,
        applies=(*missing, *missing_service(observed), *gate.instruct(observed, now)),
        storage=claims.trouble(
            delivery.mounted_claims(observed), refusals.accepted(observed, missing)
        ),
        deletes=gang.end_stale_pods(observed),
        requeue_after=soonest(found.left, gate.next_look(observed, now)),
    )
    return _with_newer_code(elastic.adapt(observed, lives, now, defaults), observed, now, defaults)


def _with_newer_code(
    decision: Decision, observed: Observed, now: datetime, defaults: Defaults
) -> Decision:
    """Go on with the sync pod beside the gang, unless the gang is about to be another."""
    if decision.state not in (State.GANG_RUNNING, State.GANG_STARTING):
        return decision
    step = reload.sync(observed, now, defaults)
    if step is None:
        return decision
    newer = refusals.all_or_refused(observed, step.applies)
    return replace(
        decision,
        newer=reload.why_older(observed, step),
        # A resize that waits for the workspace has asked for the same pod.
        applies=(*decision.applies, *(a for a in newer if a not in decision.applies)),
        deletes=(*decision.deletes, *(d for d in step.deletes if d not in decision.deletes)),
        requeue_after=soonest(decision.requeue_after, step.requeue_after),
    )


def _timed_out(decision: Decision, observed: Observed, policy: ResolvedReliability) -> Decision:
    assert policy.deadline is not None
    message = f"ran for {policy.deadline.total_seconds():.0f} s ({policy.deadline_set_by})"
    return replace(
        decision,
        state=State.DEADLINE_EXCEEDED,
        why=Reason("DeadlineExceeded", message),
        deletes=gang.end_survivors(observed, policy.grace_seconds),
    )


def _after_failure(
    observed: Observed,
    decision: Decision,
    failure: Failure,
    policy: ResolvedReliability,
    now: datetime,
    defaults: Defaults,
) -> Decision:
    """Fail, wait for the delay to pass, or make the next gang at once."""
    counts = decision.counts
    survivors = (*gang.end_survivors(observed), *halves.delete_half(observed, now))
    ended = gang.recorded(observed)
    if ended is None:
        action = evaluate_failure_policy(failure, policy, counts)
        if action is FailureAction.FAIL:
            because = why_final(policy, counts)
            why = Reason(decision.why.reason, decision.why.message + because)
            return replace(decision, why=why, deletes=survivors)
        counted = action is FailureAction.RESTART
        node = failure.said.node
        ended = gang.record(observed, decision.why, now, counted=counted, node=node)
        # The status has the count from now on, whatever becomes of the Job.
        counts = counts.after(action)
        decision = replace(decision, counts=counts)
    # The first judgement stands: what ends later in a gang that is over is collateral.
    wait = backoff.waits(observed, ended, now)
    if wait is not None:
        return replace(
            decision,
            state=State.BACKING_OFF,
            why=wait.why,
            deletes=survivors,
            ended=(*decision.ended, ended),
            requeue_after=wait.left,
        )
    next_attempt = NextAttempt(
        counts=counts,
        ended=ended,
        failure=failure.said,
        nodes=elastic.kept(observed),
    )
    step = advance(observed, next_attempt, now, defaults)
    return replace(
        step,
        ended=(*decision.ended, ended),
        deletes=(*step.deletes, *(d for d in survivors if d not in step.deletes)),
    )


def _resolved(observed: Observed) -> ResolvedSpec | None:
    """The run, where the status does not know its size yet: the gang is older than any status."""
    if observed.job.status.gpus is not None or observed.queue is None:
        return None
    try:
        return resolve_spec(observed.job, observed.queue)
    except InvalidSpecError:
        return None
