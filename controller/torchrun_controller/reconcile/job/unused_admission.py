"""An admission that the job cannot use: it is returned at once, or after a while.

The table of states (`model/phases.py`) says which. Others can use the quota meanwhile.
"""

from datetime import datetime, timedelta
from itertools import takewhile

from msgspec.structs import replace

from torchrun_api.status import Attempt
from torchrun_controller.reconcile.gang.decision import Decision, soonest
from torchrun_controller.reconcile.gang.restarts import START_TIMEOUT
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.endings import stop
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.phases import ROWS, Hold, State
from torchrun_controller.reconcile.model.times import find_end, whole_attempts
from torchrun_controller.reconcile.pods.head_and_workers import resumption_of
from torchrun_controller.reconcile.spec import admission_status

# How long an admission is kept without use. Large images take up to 20 minutes to pull.
START_LIMIT = timedelta(minutes=30)
LONGEST_POSTPONEMENT = timedelta(hours=8)


def start_timed_out(assessment: Assessment) -> Decision | None:
    """End a gang that somebody has to help to start, so that others can use its quota meanwhile."""
    end = find_end(assessment.observed.job.status.attempts, assessment.attempt)
    if end is not None and end.reason == START_TIMEOUT:
        cause = Reason(end.reason, end.message)
    else:
        blocked = assessment.blocked
        if blocked is None or _seconds_left(assessment) > 0:
            return None
        minutes = START_LIMIT.total_seconds() / 60
        message = f"The gang could not start within {minutes:.0f} minutes. {blocked.message}"
        cause = Reason(START_TIMEOUT, message)
    ending = Decision(
        state=State.START_TIMED_OUT,
        why=cause,
        attempt=assessment.attempt,
        history=assessment.history,
    )
    return stop(assessment, ending, cause) or _postponed(assessment, ending)


def _postponed(assessment: Assessment, ending: Decision) -> Decision | None:
    """Return the wait for the next gang; None once it is over, or the user changed something.

    The user may also suspend and resume the job: the status then has another reason.
    """
    job, now = assessment.observed.job, assessment.now
    meta, status = job.metadata, job.status
    is_edited = status.observed_generation != meta.generation
    end = find_end(status.attempts, assessment.attempt)
    if end is None or is_edited or status.reason != START_TIMEOUT:
        return None
    next_start = (end.end_time or now) + _postponement(status.attempts)
    if next_start <= now:
        return None
    message = (
        f"{sentence(ending.why.message)} The next gang requests admission at"
        f" {next_start:%H:%M} UTC, or once the spec is edited or the job suspended and resumed."
    )
    return replace(
        ending,
        state=State.START_POSTPONED,
        why=Reason(START_TIMEOUT, message),
        writes=replace(ending.writes, requeue_after=(next_start - now).total_seconds()),
    )


def _postponement(attempts: tuple[Attempt, ...]) -> timedelta:
    """Return the wait after a start that timed out: twice as long after each in a row."""
    ends = reversed(whole_attempts(attempts))
    in_a_row = list(takewhile(lambda end: end.reason == START_TIMEOUT, ends))
    return min(START_LIMIT * (1 << max(len(in_a_row) - 1, 0)), LONGEST_POSTPONEMENT)


def with_returned_admission(assessment: Assessment, decision: Decision) -> Decision:
    """Add the condition that returns the admission of a job without a gang, if it is not used.

    The coordinator withdraws the admission first, and releases it after the answer to that.
    """
    job, hold = assessment.observed.job, ROWS[decision.state].admission
    if hold in (Hold.KEPT, Hold.RELEASED) or not admission_status.charged(job):
        return decision
    if assessment.gang is not None and assessment.blocked is None:
        return decision
    is_kept = hold is Hold.FOR_A_WHILE or assessment.gang is not None
    seconds_left = _seconds_left(assessment) if is_kept else 0.0
    if seconds_left > 0:
        after = soonest(decision.writes.requeue_after, seconds_left)
        return replace(decision, writes=replace(decision.writes, requeue_after=after))
    reason = admission_status.withdrawn(job) or admission_status.UNUSABLE
    why = Reason(reason, "The job has no pods and returns its admission.")
    answer = ConditionUpdate(admission_status.REQUESTED, "True", why)
    return replace(decision, conditions=(*decision.conditions, answer))


def _seconds_left(assessment: Assessment) -> float:
    """Return how long the admission may still be kept without use."""
    job = assessment.observed.job
    admission = job.status.admission
    times = [
        None if admission is None else admission.time,
        *(end.end_time for end in whole_attempts(job.status.attempts)),
        *_starts(assessment.observed.gang),
    ]
    since = max((time for time in times if time is not None), default=assessment.now)
    return (min(since, assessment.now) + START_LIMIT - assessment.now).total_seconds()


def _starts(gang: ObservedGang) -> tuple[datetime | None, ...]:
    """Return when the present gang was created, and resumed."""
    if not gang.child_jobs:
        return ()
    return gang.current_job.metadata.creation_timestamp, resumption_of(gang)
