"""No gang is there: a pause, what is left of a back-off, or the way towards the next gang."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_controller.reconcile.gang import backoff, deletion, gang, halves
from torchrun_controller.reconcile.gang.decision import Decision
from torchrun_controller.reconcile.gang.restarts import (
    NO_FAILURES,
    FailureAction,
    evaluate_failure_policy,
    why_final,
)
from torchrun_controller.reconcile.job.advance import QUEUE_FOUND, NextAttempt, advance
from torchrun_controller.reconcile.job.ends import preempt, suspend
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability


def proceed(
    observed: Observed, policy: ResolvedReliability, now: datetime, defaults: Defaults
) -> Decision:
    """The next step; a gang that was deleted by somebody is counted and recorded first."""
    counts = gang.counts_of(observed)
    lost = deletion.of_lost_gang(observed, now)
    if lost is None:
        return _next(observed, NextAttempt(counts=counts), now, defaults)
    failure, ended = lost
    action = evaluate_failure_policy(failure, policy, counts)
    if action is FailureAction.FAIL:
        message = failure.said.message + why_final(policy, counts)
        return Decision(
            state=State.GANG_FAILED,
            why=Reason(failure.said.reason, message),
            attempt=observed.job.status.attempt,
            counts=counts,
            failure=failure.said,
        )
    counts = counts.after(action)
    ended = replace(ended, counted=action is FailureAction.RESTART)
    next_attempt = NextAttempt(counts=counts, ended=ended, failure=failure.said)
    decision = _next(observed, next_attempt, now, defaults)
    return replace(
        decision,
        counts=counts,
        failure=failure.said,
        ended=(ended, *(a for a in decision.ended if a.number != ended.number)),
    )


def _next(
    observed: Observed, next_attempt: NextAttempt, now: datetime, defaults: Defaults
) -> Decision:
    if observed.job.spec.suspend:
        return suspend(observed, now)
    taken = admission_status.preempted(observed.job)
    if taken:
        return preempt(observed, taken, now)
    status = observed.job.status
    recorded = (a for a in status.attempts if a.number == status.attempt)
    last = next_attempt.ended or next(recorded, None)
    wait = None if last is None else backoff.waits(observed, last, now)
    if wait is None:
        if last is not None and last.reason not in NO_FAILURES:
            next_attempt = replace(next_attempt, ended=last)
        decision = advance(observed, next_attempt, now, defaults)
    else:
        decision = Decision(
            state=State.BACKING_OFF,
            why=wait.why,
            attempt=status.attempt,
            queue=QUEUE_FOUND if observed.queue is not None else None,
            counts=next_attempt.counts,
            requeue_after=wait.left,
        )
    left = (delete for delete in _end_older(observed, now) if delete not in decision.deletes)
    return replace(decision, deletes=(*decision.deletes, *left))


def _end_older(observed: Observed, now: datetime) -> tuple[Delete, ...]:
    """What runs of an older gang, where the Job of the one that was to replace it is gone."""
    if not observed.child_jobs:
        return ()
    return (*gang.end_survivors(observed), *halves.delete_half(observed, now))
