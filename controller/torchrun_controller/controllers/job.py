"""The reconciler of TorchrunJobs: observe, reconcile, apply.

A refused object becomes a condition of its job and is retried later; the rest of the Plan is
carried out.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeAlias

import structlog
from msgspec import Struct, field

from torchrun_api.job import TorchrunJob
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.cache.observe import Key
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import NameConflictError, RejectedError
from torchrun_controller.controllers import audit_log, live_reads
from torchrun_controller.controllers.controller import (
    Done,
    Outcome,
    RequeueAfter,
    Terminal,
    log_fields,
)
from torchrun_controller.controllers.refusals import Refusals, is_refusal
from torchrun_controller.controllers.writes import STATUS_INTERVAL, EventSink, Throttled, Writes
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.job.refusals import Identity, identity
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event, Plan

# Rounds of deciding and writing in one attempt. Each but the last had another refusal.
MOST_ROUNDS = 8

log = structlog.get_logger(__name__)


Observe: TypeAlias = Callable[[str, str], Observed | None]
Decide: TypeAlias = Callable[[Observed, datetime], Plan]


class _Round(Struct):
    """What one attempt wrote so far, and what was refused."""

    done: set[Identity] = field(default_factory=set)
    created: bool = False
    refused: list[Exception] = field(default_factory=list)

    @property
    def permanent(self) -> RejectedError | None:
        """The first refusal that stays until the user changes the spec."""
        found = (e for e in self.refused if isinstance(e, RejectedError) and e.permanent)
        return next(found, None)


class JobReconciler:
    """Reconciles the keys of jobs, several at a time.

    `observe` reads the caches, `decide` is reconcile, `is_busy` says whether more keys wait than
    are being reconciled, `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        observe: Observe,
        decide: Decide,
        applier: live_reads.Finder,
        writes: Writes[Key],
        events: EventSink,
        metrics: Metrics,
        is_busy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0),
    ) -> None:
        self._observe = observe
        self._decide = decide
        self._applier = applier
        self._writes = writes
        self._events = events
        self._metrics = metrics
        self._is_busy = is_busy
        self._clock = clock
        self._now = now
        self._refusals: Refusals[Key] = Refusals(clock)

    async def attempt(self, key: Key) -> Outcome:
        """Reconcile the key once. Raises what `Applier` raises."""
        behind = self._writes.behind(key)
        if behind is not None:
            return behind
        observed = self._observe(*key)
        if observed is None:
            self._forget(key)
            return Done()
        try:
            return await self._reconcile(key, observed)
        except ApiError as error:
            self._record_forbidden(observed.job, error)
            raise

    async def _reconcile(self, key: Key, observed: Observed) -> Outcome:
        """Decide and write, again after each refusal, until a Plan is carried out completely.

        The status comes from the last Plan, which knows all refusals, and is written whatever was
        refused. Raises what `Applier` raises, except for refusals.
        """
        about, work = log_fields("job", observed.job), _Round()
        for _ in range(MOST_ROUNDS):
            shown = self._refusals.show(key, observed)
            plan = self._decide(shown, self._now())
            await live_reads.settle(self._applier, shown, plan)
            if await self._carry_out(key, shown, plan, work, about):
                break
        else:
            return RequeueAfter(STATUS_INTERVAL)
        if work.created and not (plan.status_before_deletes or work.refused) and self._is_busy():
            # Other jobs wait to start, so the status comes later. The cache event of each created
            # object requeues the key. The timeout covers an object that never appears.
            delay: float | None = STATUS_INTERVAL
        else:
            delay = await self._write_status(key, shown, plan)
        waits = [plan.requeue_after, delay]
        if delay is None:
            # Events describe the change that the status shows, so they are delayed with it.
            for event in plan.events:
                self._events.record(shown.job, event)
            if plan.status_before_deletes and not await self._delete(
                key, shown, plan.deletes, work, about
            ):
                waits.append(STATUS_INTERVAL)  # the next status shows the refusal
        waits.append(self._refusals.left(key))
        seconds = min((wait for wait in waits if wait is not None), default=None)
        if work.permanent is not None:
            return Terminal(work.permanent, seconds)
        return Done() if seconds is None else RequeueAfter(seconds)

    async def _carry_out(
        self, key: Key, observed: Observed, plan: Plan, work: _Round, about: Mapping[str, str]
    ) -> bool:
        """Apply and delete; False if something was refused for the first time.

        Objects are created in the Plan's order, each only if those before it exist: the Job of a
        gang comes after all that it needs. Existing objects are updated whatever else was refused.
        Deletes come after all applies, so that a gang that makes room for another one stays until
        then.
        """
        before, complete = len(work.refused), True
        for intent in plan.applies:
            if complete or intent.uid:
                written = await self._try(key, observed, intent, work, about)
                complete = complete and (written or bool(intent.uid))
        if len(work.refused) > before:
            return False
        if not complete:  # the Plan repeats a write that it knows to be refused
            return True
        return plan.status_before_deletes or await self._delete(
            key, observed, plan.deletes, work, about
        )

    async def _delete(
        self,
        key: Key,
        observed: Observed,
        deletes: tuple[Delete, ...],
        work: _Round,
        about: Mapping[str, str],
    ) -> bool:
        """Delete each object; False if something was refused for the first time."""
        before = len(work.refused)
        for delete in deletes:
            await self._try(key, observed, delete, work, about)
        return len(work.refused) == before

    async def _try(
        self,
        key: Key,
        observed: Observed,
        write: Apply | Delete,
        work: _Round,
        about: Mapping[str, str],
    ) -> bool:
        """Write one object once in an attempt, unless it is refused; whether it is written."""
        what = identity(write)
        if what in work.done:
            return True
        if self._refusals.holds(key, write):
            return False
        applies, deletes = ((), (write,)) if isinstance(write, Delete) else ((write,), ())
        try:
            created = await self._writes.carry_out(key, applies, deletes, about)
        except (NameConflictError, RejectedError, ApiError) as error:
            if not is_refusal(error, write):
                raise
            self._refusals.add(key, observed, write, error)
            work.refused.append(error)
            self._record_forbidden(observed.job, error)
            resource, name = write.kind.resource, write.name
            log.warning("object refused", **about, resource=resource, name=name, error=str(error))
            return False
        work.done.add(what)
        work.created = work.created or created
        return True

    def _record_forbidden(self, job: TorchrunJob, error: Exception) -> None:
        """Record an event for a 403: without a permission even the status may be refused."""
        if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
            self._events.record(job, Event("Warning", "Forbidden", error.message))

    async def _write_status(self, key: Key, observed: Observed, plan: Plan) -> float | None:
        """Write the status, or return the seconds for which it is throttled."""
        job, status = observed.job, plan.status
        if status is None:
            return None
        written = await self._writes.write_status(key, job, status)
        if isinstance(written, Throttled):
            return written.seconds
        if written is not None:
            _log(job, status)
            self._metrics.changes.wrote(observed, status, self._now())
        return None

    def _forget(self, key: Key) -> None:
        self._refusals.forget(key)
        self._writes.forget(key)


def _log(job: TorchrunJob, status: TorchrunJobStatus) -> None:
    about, lines = log_fields("job", job), audit_log.of_status(job.status, status)
    for line in lines:
        log.info(line.event, **about, **line.fields)
    if not lines:
        log.debug("status changed", **about, phase=status.phase, workers=status.workers_status)
