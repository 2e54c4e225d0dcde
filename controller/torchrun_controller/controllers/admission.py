"""The reconciler of admission: one decision over all queues, and the status writes for it.

No decision is made until the caches show the writes of the last one: a decision from an older state
would use the same quota twice. Each write has the resourceVersion of the object in the decision. A
write without a response may or may not have happened; it is repeated until its result is known.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import anyio
import structlog
from msgspec import Struct

from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import UserObject, kind_of
from torchrun_controller.cache.admission_view import ObservedAdmission
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import RejectedError, SupersededError, UnavailableError
from torchrun_controller.controllers.controller import (
    Behind,
    Done,
    Outcome,
    Postponed,
    RequeueAfter,
    log_fields,
)
from torchrun_controller.controllers.writes import EventSink, StatusWriter
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.admission.cohorts import CohortKey, Cohorts
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    Preemption,
    QueueSummary,
)
from torchrun_controller.reconcile.admission.statuses import (
    JobUpdates,
    Stage,
    StatusUpdate,
    queue_updates,
)
from torchrun_controller.reconcile.model.conditions import ADMITTED
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.spec.admission_status import charged

FIELD_MANAGER = "torchrun-controller-admission"

MAX_CONCURRENT_WRITES = 16
# Most writes of one decision that only report the position of a job in its queue.
MAX_REPORTS = 200
# Largest share of the process's time for decisions.
MAX_TIME_SHARE = 0.2
MIN_DELAY = 0.05  # seconds between two decisions
# Seconds. Not every cache event of our writes wakes the key.
BEHIND_RETRY = 0.05
# Seconds. A dead watch is noticed after 90 s, so no cache lags longer than this. A write that is
# not in the cache by then was lost, for instance in a restore of etcd.
CONFIRM_TIMEOUT = 300.0

_DECISIONS = {Stage.PREEMPT: "preempted", Stage.ADMIT: "admitted"}

log = structlog.get_logger(__name__)


class View(Protocol):
    """The part of the AdmissionView that a decision needs."""

    def observe(self, now: datetime) -> ObservedAdmission | None:
        """See `AdmissionView.observe`."""

    def version(self, owner: UserObject) -> str | None:
        """See `AdmissionView.version`."""


class _UnconfirmedWrite(Struct):
    """A write that the cache does not show yet. `since` is on the clock, in seconds."""

    update: StatusUpdate
    since: float
    has_result: bool = False  # whether the result is known


class AdmissionReconciler:
    """Reconciles the single key of admission, one attempt at a time.

    `decide` is the coordinator. `account` is called with its queue summaries. `clock` is monotonic,
    in seconds; `now` is the time of day in whole seconds.
    """

    def __init__(
        self,
        *,
        view: View,
        decide: Callable[[ClusterState, datetime], Decisions],
        applier: StatusWriter,
        events: EventSink,
        metrics: Metrics,
        account: Callable[[tuple[QueueSummary, ...]], None] = lambda queues: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0),
    ) -> None:
        self._view = view
        self._decide = decide
        self._applier = applier
        self._events = events
        self._metrics = metrics
        self._account = account
        self._clock = clock
        self._now = now
        # By UID of the object. Bounded by the writes of one decision.
        self._unconfirmed: dict[str, _UnconfirmedWrite] = {}
        # The preemptions of the last decision, by UID of the job.
        self._preemptions: dict[str, Preemption] = {}
        self._not_before = 0.0

    async def attempt(self, key: str) -> Outcome:
        """Decide once and write the decision. Raises what `Applier` raises."""
        await self._resolve_unconfirmed()
        if self._unconfirmed:
            return Behind(BEHIND_RETRY)
        delay = self._not_before - self._clock()
        if delay > 0:
            return Postponed(delay)
        start, now = self._clock(), self._now()
        observed = self._view.observe(now)
        if observed is None:
            return Behind(BEHIND_RETRY)
        decisions = self._decide(observed.state, now)
        updates = _build_updates(observed, decisions, now)
        end = self._clock()
        self._not_before = end + (end - start) / MAX_TIME_SHARE
        self._account(decisions.queues)
        self._preemptions = {preemption.uid: preemption for preemption in decisions.preemptions}
        try:
            has_more = await self._write_stages(updates, Cohorts(observed.state))
        except SupersededError:
            # An object has changed since the decision; its cache event wakes the key.
            return Behind(BEHIND_RETRY)
        waits = [decisions.requeue_after, observed.next_lost_node, MIN_DELAY if has_more else None]
        delays = [max(seconds, MIN_DELAY) for seconds in waits if seconds is not None]
        return RequeueAfter(min(delays)) if delays else Done()

    async def _resolve_unconfirmed(self) -> None:
        """Drop writes that the cache shows, and repeat writes without a response."""
        for uid, write in list(self._unconfirmed.items()):
            owner = write.update.owner
            # With a newer version in the cache, a write to the old version fails.
            if self._view.version(owner) != owner.metadata.resource_version:
                del self._unconfirmed[uid]
            elif self._clock() - write.since > CONFIRM_TIMEOUT:
                log.warning(
                    "a write has not appeared in the cache",
                    **log_fields(kind_of(owner).kind, owner),
                )
                del self._unconfirmed[uid]
            elif not write.has_result:
                await self._send(write.update)

    async def _write_stages(self, updates: list[StatusUpdate], cohorts: Cohorts) -> bool:
        """Write stage by stage; return whether reports are left over. Raises the first error.

        A refused write repeats: it stops the later decisions of its cohort, whose quota they share,
        but no other cohort, no queue's counts and no job's reason. Other errors stop all, as no
        later write may succeed either, or the write may have happened.
        """
        refusals: list[Exception] = []
        delayed: set[CohortKey] = set()
        for stage in Stage:
            batch = [update for update in updates if update.stage is stage]
            if delayed and stage <= Stage.ADMIT:
                batch = [u for u in batch if delayed.isdisjoint(_cohorts_of(u, cohorts))]
            if stage is Stage.REPORT:
                batch = sorted(batch, key=lambda update: update.rank)[:MAX_REPORTS]
            failures = await self._send_all(batch)
            # An error with an unknown result precedes a conflict, which is retried at once.
            for update, error in sorted(failures, key=lambda f: isinstance(f[1], SupersededError)):
                if not isinstance(error, ApiError | RejectedError):
                    raise error
                refusals.append(error)
                delayed |= _cohorts_of(update, cohorts)
        if refusals:
            raise refusals[0]
        return sum(update.stage is Stage.REPORT for update in updates) > MAX_REPORTS

    async def _send_all(
        self, updates: Sequence[StatusUpdate]
    ) -> list[tuple[StatusUpdate, Exception]]:
        failures: list[tuple[StatusUpdate, Exception]] = []
        remaining_updates = iter(updates)

        async def send() -> None:
            for update in remaining_updates:
                try:
                    await self._send(update)
                except Exception as error:  # raised after the other writes
                    failures.append((update, error))

        async with anyio.create_task_group() as tasks:
            for _ in range(min(len(updates), MAX_CONCURRENT_WRITES)):
                tasks.start_soon(send)
        return failures

    async def _send(self, update: StatusUpdate) -> None:
        owner = update.owner
        resource, uid = kind_of(owner).resource, owner.metadata.uid
        is_repeated = uid in self._unconfirmed
        write = self._unconfirmed.setdefault(uid, _UnconfirmedWrite(update, self._clock()))
        try:
            result = await self._applier.apply_status(owner, update.status, FIELD_MANAGER)
        except Exception as error:
            outcome = type(error).__name__.removesuffix("Error")
            self._metrics.applies.labels(resource, outcome).inc()
            if isinstance(error, SupersededError):
                write.has_result = True
            elif not (is_repeated or isinstance(error, UnavailableError)):
                # A refused repetition says nothing about the write without a response.
                del self._unconfirmed[uid]
            raise
        self._metrics.applies.labels(resource, "Gone" if result is None else "Written").inc()
        write.has_result = True
        if result is not None and result.resource_version == owner.metadata.resource_version:
            del self._unconfirmed[uid]  # no change, so no cache event comes
        self._record_decision(update)

    def _record_decision(self, update: StatusUpdate) -> None:
        """Log and count an admission or a preemption, and observe the time to admission."""
        job = update.owner
        if update.stage not in _DECISIONS or not isinstance(job, TorchrunJob):
            return
        (condition,) = update.status.conditions
        log.info(
            _DECISIONS[update.stage],
            **log_fields("job", job),
            attempt=job.status.attempt,
            phase=job.status.phase,
            reason=condition.reason,
            why=condition.message,
        )
        if update.stage is Stage.PREEMPT:
            if preemption := self._preemptions.get(job.metadata.uid):
                self._metrics.preemptions.labels(preemption.reason).inc()
            return
        self._events.record(job, Event("Normal", condition.reason, condition.message))
        pending = (c for c in job.status.conditions if (c.type, c.status) == (ADMITTED, "False"))
        since = next((c.last_transition_time for c in pending), None)
        if charged(job) == 0:
            seconds = (self._now() - since).total_seconds() if since is not None else 0.0
            self._metrics.admission_seconds.observe(max(seconds, 0.0))


def _cohorts_of(update: StatusUpdate, cohorts: Cohorts) -> frozenset[CohortKey]:
    owner = update.owner
    return cohorts.of_job(owner) if isinstance(owner, TorchrunJob) else frozenset()


def _build_updates(
    observed: ObservedAdmission, decisions: Decisions, now: datetime
) -> list[StatusUpdate]:
    jobs = JobUpdates(decisions)
    updates = (jobs.update(entry.job, entry.classification, now) for entry in observed.entries)
    return [
        *(update for update in updates if update is not None),
        *queue_updates(observed.queues, decisions.queues),
    ]
