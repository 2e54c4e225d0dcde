"""One TorchrunJob: observe, reconcile, apply.

A refusal of the API server becomes a condition of its job, and is not hammered at.
"""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

import structlog
from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.apply import NameConflictError, RejectedError, Written
from torchrun_controller.controllers.writes import ObjectWriter, Writes
from torchrun_controller.metrics import Metrics
from torchrun_controller.observe import Key
from torchrun_controller.reconcile.observed import Conflict, Observed, Rejection
from torchrun_controller.reconcile.plan import Event, Plan
from torchrun_controller.worker import (
    FORBIDDEN_RETRY,
    Done,
    Outcome,
    RequeueAfter,
    Terminal,
    spoken,
)

CONFLICT_RETRY = 30.0  # seconds until a name that somebody else holds is tried again
STATUS_INTERVAL = 1.0  # seconds between two status writes of a job in the same phase

log = structlog.get_logger(__name__)


class Writer(ObjectWriter, Protocol):
    """The part of the Applier that jobs need."""

    async def apply_status(self, job: TorchrunJob, status: TorchrunJobStatus) -> Written | None:
        """See `Applier.apply_status`."""


class Recorder(Protocol):
    """The part of the EventRecorder that jobs need."""

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


class JobReconciler:
    """What `Worker` does about the key of a job; several may be attempted at a time.

    `observe` gives what the caches know of a job and `decide` is reconcile; `clock` is monotonic,
    in seconds.
    """

    def __init__(
        self,
        *,
        observe: Observe,
        decide: Decide,
        applier: Writer,
        writes: Writes[Key],
        events: Recorder,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0),
    ) -> None:
        self._observe = observe
        self._decide = decide
        self._applier = applier
        self._writes = writes
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._now = now
        # Both hold keys of jobs that are there, no others.
        self._obstacles: dict[Key, _Obstacle] = {}
        self._status_written: dict[Key, float] = {}

    async def attempt(self, key: Key) -> Outcome:
        """One reconcile of the key. Raises what the single writes raise, see `Applier`."""
        behind = self._writes.behind(key)
        if behind is not None:
            return behind
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
        await self._writes.carry_out(key, plan.applies, plan.deletes)
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
        await self._writes.write(key, TORCHRUN_JOBS, self._applier.apply_status(job, status))
        self._measure(observed, status)
        return None

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
        job=spoken(key),
        attempt=status.attempt,
        phase=status.phase,
        reason=status.reason,
        applied=[f"{intent.kind.kind}/{intent.name}" for intent in plan.applies],
        deleted=[f"{delete.kind.kind}/{delete.name}" for delete in plan.deletes],
    )
