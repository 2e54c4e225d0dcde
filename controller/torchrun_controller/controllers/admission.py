"""The reconciler of admission: one decision over all queues, and the status writes for it.

No decision is made until the caches show the writes of the last one: a decision from an older state
would use the same quota twice. Each write has the resourceVersion of the object in the decision. A
write without a response may or may not have happened; the object is read until that is known.

A job whose status cannot be written must not stop the others. At first it keeps its turn, and only
its cohort waits until the next try. After several tries it is left out of decisions until the next
one. What it has been admitted for still counts.
"""

import time
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import anyio
import structlog
from msgspec import Struct

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import UserObject, kind_of
from torchrun_controller.cache.admission_view import ObservedAdmission
from torchrun_controller.client import ApiError
from torchrun_controller.client.write_errors import RejectedError, SupersededError, UnavailableError
from torchrun_controller.controllers.controller import (
    Behind,
    Done,
    Outcome,
    Postponed,
    RequeueAfter,
    log_fields,
)
from torchrun_controller.controllers.live_reads import Finder
from torchrun_controller.controllers.writes import EventSink, StatusWriter
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.admission.cohorts import CohortKey, Cohorts
from torchrun_controller.reconcile.admission.inputs import leave_out
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
# Seconds from a failed write until a read shows whether it happened: the API server may still carry
# out a write that it has answered with an error.
SETTLE_SECONDS = 10.0
# Longest time in seconds from a refused write to the next try.
MAX_RETRY = 60.0
# Refused writes in a row after which a job loses its turn. The tries take half a minute.
KEEPS_TURN = 5

_DECISIONS = {Stage.PREEMPT: "preempted", Stage.ADMIT: "admitted"}

log = structlog.get_logger(__name__)

T = TypeVar("T")


class DecisionView(Protocol):
    """The part of the AdmissionView that a decision needs."""

    def observe(self, now: datetime) -> ObservedAdmission | None:
        """See `AdmissionView.observe`."""

    def version(self, owner: UserObject) -> str | None:
        """See `AdmissionView.version`."""


class Client(StatusWriter, Finder, Protocol):
    """The part of the Applier that admission needs."""


class _UnconfirmedWrite(Struct):
    """A write that the cache does not show yet. Times are on the clock, in seconds."""

    update: StatusUpdate
    since: float
    has_result: bool = False  # whether the result is known
    repeated: float | None = None  # when its repetition failed


class _Refusal(Struct):
    """How often in a row the writes of an object were refused, and when the next one is due."""

    owner: UserObject
    times: int = 0
    until: float = 0.0


class AdmissionReconciler:
    """Reconciles the single key of admission, one attempt at a time.

    `decide` is the coordinator. `account` is called with its queue summaries. `clock` is monotonic,
    in seconds; `now` is the time of day in whole seconds.
    """

    def __init__(
        self,
        *,
        view: DecisionView,
        decide: Callable[[ClusterState, datetime], Decisions],
        applier: Client,
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
        # By UID of the object. Bounded by the objects in the cache.
        self._refused: dict[str, _Refusal] = {}

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
        withheld, left_out, next_retry = self._find_refused()
        decisions = self._decide(leave_out(observed.state, left_out), now)
        updates = _build_updates(observed, decisions, now)
        end = self._clock()
        self._not_before = end + (end - start) / MAX_TIME_SHARE
        self._account(decisions.queues)
        self._preemptions = {preemption.uid: preemption for preemption in decisions.preemptions}
        try:
            has_more = await self._write_stages(updates, Cohorts(observed.state), withheld)
        except SupersededError:
            # An object has changed since the decision; its cache event wakes the key.
            return Behind(BEHIND_RETRY)
        waits = [
            *(decisions.requeue_after, observed.next_lost_node, next_retry),
            MIN_DELAY if has_more else None,
        ]
        delays = [max(seconds, MIN_DELAY) for seconds in waits if seconds is not None]
        return RequeueAfter(min(delays)) if delays else Done()

    async def _resolve_unconfirmed(self) -> None:
        """Drop writes that the cache shows, and find out about those without a response."""
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
        writes = [write for write in self._unconfirmed.values() if not write.has_result]
        for _, error in await _for_each(writes, self._find_result):
            raise error

    async def _find_result(self, write: _UnconfirmedWrite) -> None:
        """Read the object, and repeat the write once; if it does not happen then, it is refused.

        A read that succeeds before a write that fails shows that others may succeed. Of a queue,
        the result does not matter: no decision depends on a write of its shares.
        """
        owner, repeated = write.update.owner, write.repeated
        if repeated is not None and self._clock() < repeated + SETTLE_SECONDS:
            return
        if isinstance(owner, TorchrunJob):
            meta = owner.metadata
            live = await self._applier.find(kind_of(owner), meta.namespace, meta.name)
            if live is None or (live.uid, live.version) != (meta.uid, meta.resource_version):
                write.has_result = True
                return
        if repeated is not None:
            del self._unconfirmed[owner.metadata.uid]
            self._record_refusal(owner, "the API server does not carry out its writes.")
            return
        try:
            await self._send(write.update)
        finally:
            write.repeated = self._clock()

    def _find_refused(self) -> tuple[frozenset[str], frozenset[str], float | None]:
        """Return the UIDs whose writes wait for the next try, and the seconds until one is due.

        The second set are those that have lost their turn.
        """
        now = self._clock()
        for uid, refusal in list(self._refused.items()):
            if self._view.version(refusal.owner) is None:
                del self._refused[uid]
        waiting = {uid: refusal for uid, refusal in self._refused.items() if refusal.until > now}
        left_out = (uid for uid, refusal in waiting.items() if refusal.times > KEEPS_TURN)
        next_try = min((refusal.until for refusal in waiting.values()), default=None)
        seconds = None if next_try is None else next_try - now
        return frozenset(waiting), frozenset(left_out), seconds

    def _record_refusal(self, owner: UserObject, why: str) -> None:
        """Delay the next try: briefly at first, as the API server may just start."""
        refusal = self._refused.setdefault(owner.metadata.uid, _Refusal(owner))
        seconds = min(2.0 ** min(refusal.times, 6), MAX_RETRY)
        refusal.times += 1
        refusal.until = self._clock() + seconds
        log.warning(
            "status refused", **log_fields(kind_of(owner).kind, owner), error=why, after=seconds
        )
        message = f"Admission cannot write the status: {why}"
        self._events.record(owner, Event("Warning", "StatusRefused", message))

    async def _write_stages(
        self, updates: list[StatusUpdate], cohorts: Cohorts, withheld: Collection[str]
    ) -> bool:
        """Write stage by stage; return whether reports are left over. Raises the first error.

        A refused write stops the later decisions of its cohort, whose quota they share, but no
        other cohort, no queue's counts and no job's reason. So does a write that waits for its next
        try (`withheld`). A conflict on a queue stops nothing. Other errors stop all, as no later
        write may succeed either, or the write may have happened.
        """
        refusals: list[Exception] = []
        conflicts: list[Exception] = []
        delayed: set[CohortKey] = set()
        for stage in Stage:
            batch = [update for update in updates if update.stage is stage]
            for update in batch:
                if update.owner.metadata.uid in withheld and stage <= Stage.ADMIT:
                    delayed |= _cohorts_of(update, cohorts)
            batch = [update for update in batch if update.owner.metadata.uid not in withheld]
            if delayed and stage <= Stage.ADMIT:
                batch = [u for u in batch if delayed.isdisjoint(_cohorts_of(u, cohorts))]
            if stage is Stage.REPORT:
                batch = sorted(batch, key=lambda update: update.rank)[:MAX_REPORTS]
            failures = await _for_each(batch, self._send)
            # An error with an unknown result precedes a conflict, which is retried at once.
            for update, error in sorted(failures, key=lambda f: isinstance(f[1], SupersededError)):
                is_conflict = isinstance(error, SupersededError)
                if is_conflict and stage is Stage.QUEUES:
                    conflicts.append(error)  # no report depends on the shares
                elif isinstance(error, ApiError | RejectedError):
                    refusals.append(error)
                    delayed |= _cohorts_of(update, cohorts)
                else:
                    raise error
        for error in (*refusals, *conflicts):
            raise error
        return sum(update.stage is Stage.REPORT for update in updates) > MAX_REPORTS

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
                if isinstance(error, ApiError | RejectedError):
                    self._record_refusal(owner, str(error))
            raise
        self._refused.pop(uid, None)
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


async def _for_each(
    items: Collection[T], act: Callable[[T], Awaitable[None]]
) -> list[tuple[T, Exception]]:
    """Act on each item, several at a time; return the failures."""
    failures: list[tuple[T, Exception]] = []
    remaining_items = iter(items)

    async def work() -> None:
        for item in remaining_items:
            try:
                await act(item)
            except Exception as error:  # raised after the other writes
                failures.append((item, error))

    async with anyio.create_task_group() as tasks:
        for _ in range(min(len(items), MAX_CONCURRENT_WRITES)):
            tasks.start_soon(work)
    return failures


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
