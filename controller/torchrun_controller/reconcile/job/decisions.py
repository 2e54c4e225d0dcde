"""The decision of a step: a state, writes, and the records of the status.

Each step builds its own. A decision also returns an admission that the job does not use.
"""

from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from torchrun_controller.reconcile.job.assess import Assessment, History
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, linked
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.phases import ROWS, Hold, State
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event
from torchrun_controller.reconcile.model.times import soonest, whole_attempts
from torchrun_controller.reconcile.pods.head_and_workers import resumption_of
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec

# How long an admission is kept without use. Large images take up to 20 minutes to pull.
START_LIMIT = timedelta(minutes=30)


class DecisionWrites(Struct, frozen=True, kw_only=True):
    """The writes of a decision, as in `Plan`. `requeue_after` is in seconds."""

    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status_before_deletes: bool = False
    requeue_after: float | None = None

    def and_also(
        self,
        *,
        applies: tuple[Apply, ...] = (),
        deletes: tuple[Delete, ...] = (),
        requeue_after: float | None = None,
    ) -> "DecisionWrites":
        """Return these writes and more, each once, with the sooner of the two times."""
        return replace(
            self,
            applies=(*self.applies, *(a for a in applies if a not in self.applies)),
            deletes=(*self.deletes, *(d for d in deletes if d not in self.deletes)),
            requeue_after=soonest(self.requeue_after, requeue_after),
        )


NO_WRITES = DecisionWrites()


class Decision(Struct, frozen=True, kw_only=True):
    """The decision of a step. `attempt` is the number of the present or the new attempt.

    `spec` is the spec of the next gang, or of a gang without a status. `conditions` are set in
    addition to that of `state`. `commit` is the commit of the workspace. `warning` is an event for
    a change of the state.
    """

    state: State
    why: Reason
    attempt: int
    spec: ResolvedSpec | None = None
    conditions: tuple[ConditionUpdate, ...] = ()
    writes: DecisionWrites = DecisionWrites()
    history: History = History()
    commit: str = ""
    warning: Event | None = None


class Known(Struct, frozen=True, kw_only=True):
    """What the status says besides the state: the spec, conditions that hold, and the commit."""

    spec: ResolvedSpec | None = None
    conditions: tuple[ConditionUpdate, ...] = ()
    commit: str = ""


NOTHING = Known()


def decide(
    assessment: Assessment,
    state: State,
    why: Reason,
    known: Known = NOTHING,
    *conditions: ConditionUpdate,
    history: History | None = None,
    writes: DecisionWrites = NO_WRITES,
    attempt: int | None = None,
    warning: Event | None = None,
) -> Decision:
    """Return the decision, by default on the last attempt with its history.

    A job that does not use its admission returns it, at once or after a while.
    """
    seconds_left = _seconds_to_keep(assessment, state)
    if seconds_left is not None and seconds_left > 0:
        writes = writes.and_also(requeue_after=seconds_left)
    elif seconds_left is not None:
        reason = admission_status.withdrawn(assessment.observed.job) or admission_status.UNUSABLE
        message = "The job has no pods and returns its admission."
        request = Reason(reason, message)
        conditions += (ConditionUpdate(admission_status.REQUESTED, "True", request),)
    return Decision(
        state=state,
        why=linked(why, assessment.defaults.docs_url),
        attempt=assessment.attempt if attempt is None else attempt,
        spec=known.spec,
        conditions=(*known.conditions, *conditions),
        writes=writes,
        history=assessment.history if history is None else history,
        commit=known.commit,
        warning=warning,
    )


def decide_on_next(
    assessment: Assessment,
    state: State,
    why: Reason,
    known: Known = NOTHING,
    *conditions: ConditionUpdate,
    writes: DecisionWrites = NO_WRITES,
) -> Decision:
    """Return the decision on a next attempt that waits, while the last gang ends.

    The status has the reason of a replacement before the gang is deleted: else it is a failure.
    """
    next_attempt = assessment.next_attempt
    assert next_attempt is not None
    if next_attempt.is_replacement:
        writes = replace(writes, status_before_deletes=True)
    return decide(
        assessment,
        state,
        why,
        known,
        *conditions,
        history=next_attempt.history,
        writes=writes.and_also(deletes=next_attempt.survivors),
    )


def _seconds_to_keep(assessment: Assessment, state: State) -> float | None:
    """Return how long an unused admission is kept, 0 if not at all; None for others.

    The table of states says which. The coordinator withdraws the admission first, and releases it
    after the answer to that. Others can use the quota meanwhile.
    """
    hold = ROWS[state].admission
    if hold in (Hold.KEPT, Hold.RELEASED) or not admission_status.charged(assessment.observed.job):
        return None
    if assessment.gang is not None and assessment.blocked is None:
        return None
    is_kept = hold is Hold.FOR_A_WHILE or assessment.gang is not None
    return seconds_to_start(assessment) if is_kept else 0.0


def seconds_to_start(assessment: Assessment) -> float:
    """Return how long the admission may still be kept without use."""
    job, now = assessment.observed.job, assessment.now
    admission = job.status.admission
    times = [
        None if admission is None else admission.time,
        *(end.end_time for end in whole_attempts(job.status.attempts)),
        *_starts(assessment.observed.gang),
    ]
    since = max((time for time in times if time is not None), default=now)
    return (min(since, now) + START_LIMIT - now).total_seconds()


def _starts(gang: ObservedGang) -> tuple[datetime | None, ...]:
    """Return when the present gang was created, and resumed."""
    if not gang.child_jobs:
        return ()
    return gang.current_job.metadata.creation_timestamp, resumption_of(gang)
