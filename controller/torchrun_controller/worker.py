"""One key: observe, reconcile, apply; the outcome becomes a verb of the work queue.

Nothing that happens to one key ends the process or holds up another: a refusal of the API server
becomes a condition of its job, and a bug in reconcile is logged, counted and retried with backoff.
"""

import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias, assert_never

import structlog
from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import TORCHRUN_JOBS, Kind
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.apply import (
    NameConflictError,
    RejectedError,
    SupersededError,
    UnavailableError,
    Written,
)
from torchrun_controller.leader import NotLeader
from torchrun_controller.metrics import Metrics
from torchrun_controller.own_writes import ReadYourWrites
from torchrun_controller.reconcile.observed import Conflict, Observed, Rejection
from torchrun_controller.reconcile.plan import Apply, Delete, Event, Plan
from torchrun_controller.transport import ApiError
from torchrun_controller.workqueue import AsyncWorkQueue, ShutDownError

Key: TypeAlias = tuple[str, str]  # namespace, name

CONFLICT_RETRY = 30.0  # seconds until a name that somebody else holds is tried again
FORBIDDEN_RETRY = 60.0  # seconds until an object that quota or admission forbade is tried again
STATUS_INTERVAL = 1.0  # seconds between two status writes of a job in the same phase
# A cache that reaches our writes wakes the key itself; this is for the case that it never does.
BEHIND_RETRY = 1.0

log = structlog.get_logger(__name__)


class Done(Struct, frozen=True):
    """Nothing more to do until something changes."""


class RequeueAfter(Struct, frozen=True):
    """Look again after this many seconds."""

    seconds: float


class Behind(Struct, frozen=True):
    """The caches do not show our own last writes yet; nothing was decided."""

    seconds: float


class Retry(Struct, frozen=True):
    """Failed; again with backoff, or after as many seconds as the API server asked for."""

    error: Exception
    after: float | None = None


class Terminal(Struct, frozen=True):
    """Refused; not again until the job or its queue changes."""

    error: Exception


Outcome = Done | RequeueAfter | Behind | Retry | Terminal


class Writer(Protocol):
    """The part of the Applier that a worker uses."""

    async def apply(self, intent: Apply) -> Written:
        """See `Applier.apply`."""

    async def apply_status(self, job: TorchrunJob, status: TorchrunJobStatus) -> Written | None:
        """See `Applier.apply_status`."""

    async def delete(self, delete: Delete) -> Written | None:
        """See `Applier.delete`."""


class Recorder(Protocol):
    """The part of the EventRecorder that a worker uses."""

    def record(self, job: TorchrunJob, event: Event) -> None:
        """See `EventRecorder.record`."""


Observe: TypeAlias = Callable[[str, str], Observed | None]
Decide: TypeAlias = Callable[[Observed, datetime], Plan]


class _Obstacle(Struct, frozen=True):
    """Why the last attempt failed, so that the status goes on saying so and nothing is hammered."""

    made_from: tuple[object, ...]  # what the refused Plan was made from, see `_made_from`
    until: float  # by the clock; then try again
    conflict: Conflict | None = None
    rejection: Rejection | None = None

    def shown(self, observed: Observed) -> Observed:
        """What reconcile shall see, so that the status says why nothing moves."""
        if self.conflict is not None:
            conflicts = (self.conflict, *observed.conflicts)
            return replace(observed, conflicts=conflicts)
        return replace(observed, rejection=self.rejection)


class Worker:
    """Reconciles keys one by one; run several `run` tasks on the same instance.

    `observe` gives what the caches know of a job and `decide` is reconcile; `clock` is monotonic,
    in seconds.
    """

    def __init__(
        self,
        queue: AsyncWorkQueue[Key],
        *,
        observe: Observe,
        decide: Decide,
        applier: Writer,
        own_writes: ReadYourWrites[Key],
        events: Recorder,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0),
    ) -> None:
        self._queue = queue
        self._observe = observe
        self._decide = decide
        self._applier = applier
        self._own_writes = own_writes
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._now = now
        # Both hold keys of jobs that are there, no others.
        self._obstacles: dict[Key, _Obstacle] = {}
        self._status_written: dict[Key, float] = {}

    async def run(self) -> None:
        """Take keys until the queue is shut down; what waits then is left for the next leader."""
        with suppress(ShutDownError):
            while not self._queue.shutting_down:
                await self._process(await self._queue.take())

    async def _process(self, key: Key) -> None:
        started = self._clock()
        try:
            outcome = await self._outcome(key)
            self._settle(key, outcome, self._clock() - started)
        finally:
            self._queue.done(key)

    def _settle(self, key: Key, outcome: Outcome, seconds: float) -> None:
        """The one place where an outcome becomes a verb of the queue, a metric and a log line."""
        name = type(outcome).__name__
        self._metrics.reconciles.labels(name).inc()
        self._metrics.reconcile_seconds.labels(name).observe(seconds)
        queue = self._queue
        match outcome:
            case Done():
                queue.forget(key)
            case RequeueAfter(after):
                queue.forget(key)
                queue.add_after(key, after)
            case Behind(after):
                self._metrics.stale_sync_skips.inc()
                queue.add_after(key, after)
            case Retry(error, wait):
                if wait is None:
                    queue.add_rate_limited(key)
                else:
                    queue.add_after(key, wait)
                # Others are at work on the same objects: no trouble, unlike the rest.
                say = log.info if isinstance(error, SupersededError) else log.warning
                say("retried later", job="/".join(key), error=str(error), after=wait)
            case Terminal(error):
                queue.forget(key)
                log.warning("refused until it changes", job="/".join(key), error=str(error))
            case _:
                assert_never(outcome)

    async def _outcome(self, key: Key) -> Outcome:
        try:
            return await self.attempt(key)
        except UnavailableError as error:
            return Retry(error, error.retry_after)
        except (NameConflictError, RejectedError) as error:
            # The Plan insists although it has been told: not at once again.
            return Retry(error, FORBIDDEN_RETRY)
        except (SupersededError, ApiError, NotLeader) as error:
            return Retry(error)
        except Exception as error:
            self._metrics.reconcile_panics.inc()
            log.exception("a bug in the controller; please report it", job="/".join(key))
            return Retry(error)

    async def attempt(self, key: Key) -> Outcome:
        """One reconcile of the key. Raises what the single writes raise, see `Applier`."""
        behind = self._own_writes.behind(key)
        if behind is not None:
            return Behind(min(behind, BEHIND_RETRY))
        observed = self._observe(*key)
        if observed is None:
            self._forget(key)
            return Done()
        obstacle = self._obstacle(key, observed)
        if obstacle is not None:
            return self._held(obstacle, await self._reconcile(key, obstacle.shown(observed)))
        try:
            return await self._reconcile(key, observed)
        except (NameConflictError, RejectedError) as error:
            obstacle = self._met(error, observed)
            self._obstacles[key] = obstacle
            outcome = self._held(obstacle, await self._reconcile(key, obstacle.shown(observed)))
            return Terminal(error) if isinstance(outcome, Done) else outcome

    async def _reconcile(self, key: Key, observed: Observed) -> Done | RequeueAfter:
        plan = self._decide(observed, self._now())
        for intent in plan.applies:
            await self._write(key, intent.kind, self._applier.apply(intent))
        for delete in plan.deletes:
            await self._write(key, delete.kind, self._applier.delete(delete))
        held_back = await self._write_status(key, observed, plan)
        if held_back is None:
            # They tell of the change that the status shows, so they are held back with it.
            for event in plan.events:
                self._events.record(observed.job, event)
        if plan.applies or plan.deletes or (plan.status is not None and held_back is None):
            _log_decision(key, observed.job, plan)
        waits = [seconds for seconds in (plan.requeue_after, held_back) if seconds is not None]
        return RequeueAfter(min(waits)) if waits else Done()

    async def _write_status(self, key: Key, observed: Observed, plan: Plan) -> float | None:
        """Write the status, or return for how many seconds it is held back."""
        job, status = observed.job, plan.status
        if status is None:
            return None
        now = self._clock()
        if status.phase == job.status.phase:
            next_write = self._status_written.get(key, -math.inf) + STATUS_INTERVAL
            if now < next_write:
                return next_write - now
        self._status_written[key] = now
        await self._write(key, TORCHRUN_JOBS, self._applier.apply_status(job, status))
        self._measure(observed, status)
        return None

    async def _write(
        self, key: Key, kind: Kind[Any], write: Coroutine[None, None, Written | None]
    ) -> None:
        try:
            written = await write
        except Exception as error:
            result = type(error).__name__.removesuffix("Error")
            self._metrics.applies.labels(kind.resource, result).inc()
            raise
        self._metrics.applies.labels(kind.resource, "Gone" if written is None else "Written").inc()
        self._own_writes.note(key, written)

    def _measure(self, observed: Observed, status: TorchrunJobStatus) -> None:
        """How long users waited, at the moment that the wait is over."""
        before, now = observed.job.status.phase, self._now()
        if before == "Syncing" and status.phase in ("Queued", "Running") and observed.sync_pods:
            since = observed.sync_pods[-1].metadata.creation_timestamp or now
            self._metrics.sync_seconds.observe((now - since).total_seconds())
        if status.phase == "Running" != before and status.attempt == 0:
            since = observed.job.metadata.creation_timestamp or now
            self._metrics.job_start_seconds.observe((now - since).total_seconds())

    def _obstacle(self, key: Key, observed: Observed) -> _Obstacle | None:
        """What still stands in the way; forgotten once it may be gone."""
        obstacle = self._obstacles.get(key)
        if obstacle is None:
            return None
        if obstacle.made_from == _made_from(observed) and self._clock() < obstacle.until:
            return obstacle
        del self._obstacles[key]
        return None

    def _met(self, error: NameConflictError | RejectedError, observed: Observed) -> _Obstacle:
        made_from, now = _made_from(observed), self._clock()
        if isinstance(error, NameConflictError):
            return _Obstacle(made_from, now + CONFLICT_RETRY, conflict=error.conflict)
        until = math.inf if error.permanent else now + FORBIDDEN_RETRY
        return _Obstacle(made_from, until, rejection=error.rejection)

    def _held(self, obstacle: _Obstacle, outcome: Done | RequeueAfter) -> Done | RequeueAfter:
        """Come back when the obstacle is to be tried again, if that is earlier."""
        left = max(0.0, obstacle.until - self._clock())
        if isinstance(outcome, RequeueAfter):
            return RequeueAfter(min(left, outcome.seconds))
        return outcome if math.isinf(left) else RequeueAfter(left)

    def _forget(self, key: Key) -> None:
        self._obstacles.pop(key, None)
        self._status_written.pop(key, None)


def _made_from(observed: Observed) -> tuple[object, ...]:
    """Identity and generation of what users write: a change of these may remove an obstacle."""
    job, queue = observed.job.metadata, observed.queue
    of_queue = (queue.metadata.uid, queue.metadata.generation) if queue is not None else ()
    return (job.uid, job.generation, *of_queue)


def _log_decision(key: Key, job: TorchrunJob, plan: Plan) -> None:
    status = plan.status or job.status
    log.info(
        "reconciled",
        job="/".join(key),
        attempt=status.attempt,
        phase=status.phase,
        reason=status.reason,
        applied=[f"{intent.kind.kind}/{intent.name}" for intent in plan.applies],
        deleted=[f"{delete.kind.kind}/{delete.name}" for delete in plan.deletes],
    )
