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

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.cache.observe import Key
from torchrun_controller.client import ApiError
from torchrun_controller.client.write_errors import NameConflictError, RejectedError
from torchrun_controller.controllers import decision_log, live_reads
from torchrun_controller.controllers.controller import (
    Done,
    Outcome,
    Postponed,
    RequeueAfter,
    Terminal,
    Throttle,
    log_fields,
)
from torchrun_controller.controllers.refusals import Refusals, UnwrittenStatuses, is_refusal
from torchrun_controller.controllers.writes import STATUS_INTERVAL, EventSink, Throttled, Writes
from torchrun_controller.metrics.changes import record_status
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.job.refusals import Identity, identity
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event, Plan, StatusWrite

# Most Plans in one reconcile. Each but the last has met a new refusal.
MAX_PLANS = 8

# Each change of a pod wakes its job, and each reconcile reads all pods of the job: the start of a
# gang would cost the square of its size. So after a reconcile of more than THROTTLED_PODS, the next
# one waits a second for each PODS_PER_SECOND.
THROTTLED_PODS = 100
PODS_PER_SECOND = 2000

log = structlog.get_logger(__name__)


Observe: TypeAlias = Callable[[str, str], Observed | None]
Decide: TypeAlias = Callable[[Observed, datetime], Plan]


class _Attempt(Struct):
    """One attempt: its job, its successful writes, and the errors of refused ones.

    `waits` are seconds until the next attempt.
    """

    key: Key
    observed: Observed
    fields: Mapping[str, str]  # of log lines
    successful_writes: set[Identity] = field(default_factory=set)
    has_created: bool = False
    refusal_errors: list[Exception] = field(default_factory=list)
    waits: list[float | None] = field(default_factory=list)

    @property
    def permanent(self) -> RejectedError | None:
        """The first refusal that lasts until the user changes the spec; None without one."""
        errors = (error for error in self.refusal_errors if isinstance(error, RejectedError))
        return next((error for error in errors if error.permanent), None)


class JobReconciler:
    """Reconciles the keys of jobs, several at a time.

    `observe` reads the caches and `decide` is reconcile. `is_busy` returns whether more keys wait
    than can be reconciled at once. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        observe: Observe,
        decide: Decide,
        applier: live_reads.Reader,
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
        self._throttle: Throttle[Key] = Throttle(clock)
        self._unwritten: UnwrittenStatuses[Key] = UnwrittenStatuses(clock)

    async def attempt(self, key: Key) -> Outcome:
        """Reconcile the key once. Raises what `Applier` raises."""
        behind = self._writes.behind(key)
        if behind is not None:
            return behind
        delay = self._throttle.delay(key)
        if delay is not None:
            return Postponed(delay)
        observed = self._observe(*key)
        if observed is None:
            self._forget(key)
            return Done()
        observed = self._unwritten.with_status(key, observed)
        try:
            attempt = _Attempt(key, observed, log_fields("job", observed.job))
            return await self._reconcile(attempt)
        except ApiError as error:
            self._record_forbidden(observed.job, error)
            raise
        finally:
            pods = len(observed.gang.workers) + len(observed.gang.stale_pods)
            if pods > THROTTLED_PODS:
                self._throttle.record(key, pods / PODS_PER_SECOND)

    async def _reconcile(self, attempt: _Attempt) -> Outcome:
        """Decide and write, and repeat after each new refusal.

        The status is that of the last Plan, which includes all refusals. It is written even if
        objects were refused. Raises what `Applier` raises, except for refusals.
        """
        for _ in range(MAX_PLANS):
            observed = self._refusals.with_refusals(attempt.key, attempt.observed)
            plan = self._decide(observed, self._now())
            await live_reads.verify(self._applier, plan.checks)
            if await self._carry_out(attempt, plan):
                break
        else:
            return RequeueAfter(STATUS_INTERVAL)
        waits = [plan.requeue_after, *attempt.waits, self._refusals.next_retry(attempt.key)]
        seconds = min((wait for wait in waits if wait is not None), default=None)
        if attempt.permanent is not None:
            return Terminal(attempt.permanent, seconds)
        return Done() if seconds is None else RequeueAfter(seconds)

    async def _carry_out(self, attempt: _Attempt, plan: Plan) -> bool:
        """Write in the order of the Plan; False if its status does not report a new refusal.

        Objects are created only if the earlier ones exist: the Job of a gang comes after the
        objects that it needs. Existing objects are updated even after a refusal. Nothing is deleted
        after a refusal, so that a gang is not deleted for a replacement that is refused.
        """
        refusals_before, has_status = len(attempt.refusal_errors), False
        may_create = may_delete = True
        for write in plan.writes:
            match write:
                case Apply():
                    if may_create or write.uid:
                        is_written = await self._write_object(attempt, write)
                        may_create = may_create and (is_written or bool(write.uid))
                        may_delete = may_delete and is_written
                case Delete():
                    if may_delete:
                        await self._write_object(attempt, write)
                case StatusWrite():
                    if len(attempt.refusal_errors) > refusals_before:
                        return False
                    has_status = True
                    delay = await self._write_status(attempt, write)
                    attempt.waits += [delay, self._unwritten.next_retry(attempt.key)]
                    may_delete = may_delete and not (write.before_deletes and delay is not None)
        is_refused = len(attempt.refusal_errors) > refusals_before
        if has_status and is_refused:
            attempt.waits.append(STATUS_INTERVAL)  # the next status reports the refusal
        return has_status or not is_refused

    async def _write_object(self, attempt: _Attempt, write: Apply | Delete) -> bool:
        """Write one object, at most once in an attempt; False if it is refused."""
        key, observed, write_id = attempt.key, attempt.observed, identity(write)
        if write_id in attempt.successful_writes:
            return True
        if self._refusals.is_refused(key, write):
            return False
        try:
            has_created = await self._writes.write(key, write, attempt.fields)
        except (NameConflictError, RejectedError, ApiError) as error:
            if not is_refusal(error, write):
                raise
            self._refusals.add(key, observed, write, error)
            attempt.refusal_errors.append(error)
            self._record_forbidden(observed.job, error)
            what = {"resource": write.kind.resource, "name": write.name, "error": str(error)}
            log.warning("object refused", **attempt.fields, **what)
            return False
        attempt.successful_writes.add(write_id)
        attempt.has_created = attempt.has_created or has_created
        return True

    def _record_forbidden(self, job: TorchrunJob, error: Exception) -> None:
        """Record an event for a 403: the status may be refused for the same reason."""
        if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
            self._events.record(job, Event("Warning", "Forbidden", error.message))

    async def _write_status(self, attempt: _Attempt, write: StatusWrite) -> float | None:
        """Write the status and record its events, or return the seconds until that may be done.

        If other jobs wait to start, the status of a new gang comes later: the cache event of each
        created object requeues the key, and the seconds cover an object that never appears. A
        status that the API server refuses counts as written: a gang must end even so.
        """
        key, observed, job = attempt.key, attempt.observed, attempt.observed.job
        is_urgent = write.before_deletes or not attempt.has_created or bool(attempt.refusal_errors)
        if not is_urgent and self._is_busy():
            return STATUS_INTERVAL
        status = self._unwritten.to_write(key, job, write.status)
        if status is not None:
            try:
                result = await self._writes.write_status(key, job, status)
            except ApiError as error:
                if not error.is_permanent:
                    raise
                self._keep_refused_status(key, job, status, error)
            else:
                if isinstance(result, Throttled):
                    return result.seconds
                self._unwritten.forget(key)
                if result is not None:
                    _log_status(job, status)
                    record_status(self._metrics, observed, status, self._now())
        for event in write.events:
            self._events.record(job, event)
        return None

    def _keep_refused_status(
        self, key: Key, job: TorchrunJob, status: TorchrunJobStatus, error: ApiError
    ) -> None:
        self._unwritten.keep(key, job, status)
        message = (
            f"The API server refused the status of this job: {error.message} The job goes on"
            " without it. Make the job smaller, or correct the policy that refuses it."
        )
        self._events.record(job, Event("Warning", "StatusRefused", message))
        log.warning("status refused", **log_fields("job", job), error=str(error))

    def _forget(self, key: Key) -> None:
        self._refusals.forget(key)
        self._writes.forget(key)
        self._throttle.forget(key)
        self._unwritten.forget(key)


def _log_status(job: TorchrunJob, status: TorchrunJobStatus) -> None:
    fields, lines = log_fields("job", job), decision_log.status_lines(job.status, status)
    for line in lines:
        log.info(line.event, **fields, **line.fields)
    if not lines:
        log.debug("status changed", **fields, phase=status.phase, workers=status.workers_status)
