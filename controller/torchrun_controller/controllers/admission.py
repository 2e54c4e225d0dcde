"""The reconciler of admission: one decision over all queues, and the status writes for it.

It decides nothing before the caches show the writes of the last decision, however long that takes:
a decision from an older state would use the same quota twice. Every write applies to exactly the
state of the object that was decided on. A write whose answer was lost is sent again until its
result is known: it may or may not have happened.
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
from torchrun_controller.client.apply import SupersededError, UnavailableError
from torchrun_controller.controllers.controller import (
    Behind,
    Done,
    Outcome,
    RequeueAfter,
    log_fields,
)
from torchrun_controller.controllers.writes import EventSink, StatusWriter
from torchrun_controller.metrics.registry import Metrics
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

WRITES_AT_A_TIME = 16
# Most writes between two decisions that only inform a job of its place.
TOLD_AT_ONCE = 200
# Largest share of the process's time for deciding.
LARGEST_SHARE = 0.2
SOON = 0.05  # seconds
# Seconds. Not every cache event of our writes wakes the key.
BEHIND_RETRY = 0.05
# Seconds. A dead watch is noticed after 90 s, so a cache is never this late. After this time the
# server was restored from a backup and the write is lost.
PATIENCE = 300.0

_DECISIONS = {Stage.PREEMPT: "preempted", Stage.ADMIT: "admitted"}

log = structlog.get_logger(__name__)


class View(Protocol):
    """The part of the AdmissionView that a decision needs."""

    def observe(self, now: datetime) -> ObservedAdmission | None:
        """See `AdmissionView.observe`."""

    def version(self, owner: UserObject) -> str | None:
        """See `AdmissionView.version`."""


class _Sent(Struct):
    """A write that the cache does not show yet; `answered`: its result is known."""

    word: StatusUpdate
    since: float
    answered: bool = False


class AdmissionReconciler:
    """Reconciles the single key of admission, one attempt at a time.

    `decide` is the coordinator. `account` is called with the summaries of its queues. `clock` is
    monotonic, in seconds.
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
        # By UID; at most what one decision writes.
        self._sent: dict[str, _Sent] = {}
        # Of the last decision, by UID.
        self._preempts: dict[str, Preemption] = {}
        self._not_before = 0.0

    async def attempt(self, key: str) -> Outcome:
        """Decide once and write the decision. Raises what `Applier` raises."""
        await self._find_out()
        if self._sent:
            return Behind(BEHIND_RETRY)
        early = self._not_before - self._clock()
        if early > 0:
            return RequeueAfter(early)
        began, now = self._clock(), self._now()
        seen = self._view.observe(now)
        if seen is None:
            return Behind(BEHIND_RETRY)
        decisions = self._decide(seen.state, now)
        words = _words(seen, decisions, now)
        ended = self._clock()
        self._not_before = ended + (ended - began) / LARGEST_SHARE
        self._account(decisions.queues)
        self._preempts = {preempt.uid: preempt for preempt in decisions.preemptions}
        try:
            late = await self._write(words)
        except SupersededError:
            # An object has changed since the decision; its cache event wakes the key.
            return Behind(BEHIND_RETRY)
        waits = [decisions.requeue_after, seen.next_look, SOON if late else None]
        looks = [max(seconds, SOON) for seconds in waits if seconds is not None]
        return RequeueAfter(min(looks)) if looks else Done()

    async def _find_out(self) -> None:
        """Drop writes that the cache shows; send again those without an answer."""
        for uid, sent in list(self._sent.items()):
            owner = sent.word.owner
            # With a new version in the cache, a write to the old one can no longer happen.
            if self._view.version(owner) != owner.metadata.resource_version:
                del self._sent[uid]
            elif self._clock() - sent.since > PATIENCE:
                log.warning("a write was never seen", **log_fields(kind_of(owner).kind, owner))
                del self._sent[uid]
            elif not sent.answered:
                await self._send(sent.word)

    async def _write(self, words: list[StatusUpdate]) -> bool:
        """Write stage by stage; return whether writes are left. Raises the first error."""
        for stage in Stage:
            batch = [word for word in words if word.stage is stage]
            if stage is Stage.REPORT:
                batch = sorted(batch, key=lambda word: word.rank)[:TOLD_AT_ONCE]
            errors = await self._send_all(batch)
            # An unknown result, retried after a while, goes before a conflict, retried at once.
            for error in sorted(errors, key=lambda e: isinstance(e, SupersededError)):
                raise error
        return sum(word.stage is Stage.REPORT for word in words) > TOLD_AT_ONCE

    async def _send_all(self, words: Sequence[StatusUpdate]) -> list[Exception]:
        errors: list[Exception] = []
        left = iter(words)

        async def send() -> None:
            for word in left:
                try:
                    await self._send(word)
                except Exception as error:  # raised after the other writes
                    errors.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(len(words), WRITES_AT_A_TIME)):
                tasks.start_soon(send)
        return errors

    async def _send(self, word: StatusUpdate) -> None:
        owner = word.owner
        resource, uid = kind_of(owner).resource, owner.metadata.uid
        sent = self._sent.setdefault(uid, _Sent(word, self._clock()))
        try:
            written = await self._applier.apply_status(owner, word.status, FIELD_MANAGER)
        except Exception as error:
            result = type(error).__name__.removesuffix("Error")
            self._metrics.applies.labels(resource, result).inc()
            if isinstance(error, SupersededError):
                sent.answered = True
            elif not isinstance(error, UnavailableError):
                del self._sent[uid]
            raise
        self._metrics.applies.labels(resource, "Gone" if written is None else "Written").inc()
        sent.answered = True
        if written is not None and written.resource_version == owner.metadata.resource_version:
            del self._sent[uid]  # it was a no-op
        self._tell(word)

    def _tell(self, word: StatusUpdate) -> None:
        """Log and count each admission and preemption, and observe the time to admission."""
        job = word.owner
        if word.stage not in _DECISIONS or not isinstance(job, TorchrunJob):
            return
        (said,) = word.status.conditions
        log.info(
            _DECISIONS[word.stage],
            **log_fields("job", job),
            attempt=job.status.attempt,
            phase=job.status.phase,
            reason=said.reason,
            why=said.message,
        )
        if word.stage is Stage.PREEMPT:
            if preempt := self._preempts.get(job.metadata.uid):
                self._metrics.preemptions.labels(preempt.reason).inc()
            return
        self._events.record(job, Event("Normal", said.reason, said.message))
        waited = (c for c in job.status.conditions if (c.type, c.status) == (ADMITTED, "False"))
        since = next((c.last_transition_time for c in waited), None)
        if charged(job) == 0:
            seconds = (self._now() - since).total_seconds() if since is not None else 0.0
            self._metrics.admission_seconds.observe(max(seconds, 0.0))


def _words(seen: ObservedAdmission, decisions: Decisions, now: datetime) -> list[StatusUpdate]:
    jobs = JobUpdates(decisions)
    updates = (jobs.update(entry.job, entry.classification, now) for entry in seen.entries)
    return [
        *(update for update in updates if update is not None),
        *queue_updates(seen.queues, decisions.queues),
    ]
