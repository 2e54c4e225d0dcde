"""One TorchrunJob: observe, reconcile, apply.

A refusal of the API server becomes a condition of its job, and is not hammered at.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Protocol, TypeAlias

import structlog
from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.apply import NameConflictError, RejectedError, Written
from torchrun_controller.controllers import decisions, doubt
from torchrun_controller.controllers.pacing import STATUS_INTERVAL, StatusPace
from torchrun_controller.controllers.writes import ObjectWriter, Writes
from torchrun_controller.metrics import Metrics
from torchrun_controller.observe import Key
from torchrun_controller.reconcile.observed import Conflict, Observed, Rejection
from torchrun_controller.reconcile.plan import Event, Plan
from torchrun_controller.transport import ApiError
from torchrun_controller.worker import (
    FORBIDDEN_RETRY,
    Done,
    Outcome,
    RequeueAfter,
    Terminal,
    named,
)

CONFLICT_RETRY = 30.0  # seconds until a name that somebody else holds is tried again
# Seconds until an object that the API server calls invalid is tried again although nothing of it
# has changed: admission policies and webhooks answer so too, and change by themselves.
REJECTED_RETRY = 300.0

log = structlog.get_logger(__name__)


class Writer(ObjectWriter, doubt.Finder, Protocol):
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

    `observe` gives what the caches know of a job and `decide` is reconcile; `is_busy` says whether
    more jobs wait than are attempted; `clock` is monotonic, in seconds.
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
        self._obstacles: dict[Key, _Obstacle] = {}  # of jobs that are there, no others
        self._pace: StatusPace[Key] = StatusPace(clock)

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
            if isinstance(error, RejectedError) and error.permanent:
                return Terminal(error, outcome.seconds)
            return outcome
        except ApiError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                # A right was taken away: no condition says so, and the status may not be ours.
                event = Event("Warning", "Forbidden", error.message)
                self._events.record(observed.job, event)
            raise

    async def _reconcile(self, key: Key, observed: Observed) -> Done | RequeueAfter:
        plan = self._decide(observed, self._now())
        about, first = named("job", observed.job), plan.tells_first
        await doubt.settle(self._applier, observed, plan)
        deletes = () if first else plan.deletes
        creates = await self._writes.carry_out(key, plan.applies, deletes, about)
        if creates and not first and self._is_busy():
            # Others wait to be started. What was created brings the key back, behind them, as it
            # shows in the cache, and the status with it; the time is for one that never shows it.
            held_back: float | None = STATUS_INTERVAL
        else:
            held_back = await self._write_status(key, observed, plan)
        if first and held_back is None:
            await self._writes.carry_out(key, (), plan.deletes, about)
        if held_back is None:
            # They tell of the change that the status shows, so they are held back with it.
            for event in plan.events:
                self._events.record(observed.job, event)
        waits = [seconds for seconds in (plan.requeue_after, held_back) if seconds is not None]
        return RequeueAfter(min(waits)) if waits else Done()

    async def _write_status(self, key: Key, observed: Observed, plan: Plan) -> float | None:
        """Write the status, or return for how many seconds it is held back."""
        job, status = observed.job, plan.status
        if status is None:
            return None
        held_back = self._pace.begin(key, same_phase=status.phase == job.status.phase)
        if held_back is not None:
            return held_back
        write = self._applier.apply_status(job, status)
        if await self._writes.write(key, TORCHRUN_JOBS, write) is not None:
            _log(job, status)
            self._metrics.changes.wrote(observed, status, self._now())
        return None

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
        wait = REJECTED_RETRY if error.permanent else FORBIDDEN_RETRY
        return _Obstacle(made_from, now + wait, rejection=error.rejection)

    def _held(self, obstacle: _Obstacle, outcome: Done | RequeueAfter) -> RequeueAfter:
        """Come back when the obstacle is to be tried again, if that is earlier."""
        left = max(0.0, obstacle.until - self._clock())
        if isinstance(outcome, RequeueAfter):
            return RequeueAfter(min(left, outcome.seconds))
        return RequeueAfter(left)

    def _forget(self, key: Key) -> None:
        self._obstacles.pop(key, None)
        self._pace.forget(key)


def _made_from(observed: Observed) -> tuple[object, ...]:
    """Identity and generation of what users write: a change of these may remove an obstacle."""
    job, queue = observed.job.metadata, observed.queue
    of_queue = (queue.metadata.uid, queue.metadata.generation) if queue is not None else ()
    return (job.uid, job.generation, *of_queue)


def _log(job: TorchrunJob, status: TorchrunJobStatus) -> None:
    about, lines = named("job", job), decisions.of_status(job.status, status)
    for line in lines:
        log.info(line.event, **about, **line.fields)
    if not lines:
        log.debug("status changed", **about, phase=status.phase, workers=status.workers_status)
