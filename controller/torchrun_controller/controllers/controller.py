"""The loop of a controller: take a key, reconcile it, turn the outcome into a queue operation.

The controllers of jobs, queues and admission each have a work queue and a reconciler for one key.
No failure of one key ends the process or delays another: a bug in a reconciler is logged, counted
and retried with backoff.
"""

import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, assert_never, get_args

import structlog
from msgspec import Struct

from torchrun_api.kinds.resources import UserObject
from torchrun_controller.client import ApiError
from torchrun_controller.client.write_errors import (
    NameConflictError,
    RejectedError,
    SupersededError,
    UnavailableError,
)
from torchrun_controller.leader import NotLeader
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.workqueue import AsyncWorkQueue, ShutDownError

FORBIDDEN_RETRY = 60.0  # seconds until a retry of an object that quota or admission forbids

log = structlog.get_logger(__name__)


class Done(Struct, frozen=True):
    """Nothing to do until something changes."""


class RequeueAfter(Struct, frozen=True):
    """Reconcile again after this many seconds."""

    seconds: float


class Behind(Struct, frozen=True):
    """The caches do not show our last writes yet. Retry after this many seconds at most."""

    seconds: float


class Postponed(Struct, frozen=True):
    """Not due yet, so not tried. Retry after this many seconds. Earlier failures still count."""

    seconds: float


class Retry(Struct, frozen=True):
    """Failed. Retry with back-off, and not before `after` seconds unless something changes."""

    error: Exception
    after: float | None = None


class Terminal(Struct, frozen=True):
    """Refused. Retry when the user changes the spec, or after this many seconds."""

    error: Exception
    after: float | None = None


Outcome = Done | RequeueAfter | Behind | Postponed | Retry | Terminal


K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)


class Reconciler(Protocol[K_contra]):
    """Reconciles one key."""

    async def attempt(self, key: K_contra) -> Outcome:
        """Reconcile the key once. May raise what `Applier` raises."""


class Controller(Generic[K]):
    """Reconciles the keys of one work queue, `concurrency` of them at a time.

    `name` appears in metrics and log lines; `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        name: str,
        queue: AsyncWorkQueue[K],
        reconciler: Reconciler[K],
        metrics: Metrics,
        *,
        concurrency: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.concurrency = concurrency
        self._queue = queue
        self._reconciler = reconciler
        self._metrics = metrics
        self._clock = clock
        # Keys with a Retry-After of the server: changes do not wake them earlier.
        self._server_throttle: Throttle[K] = Throttle(clock)
        # Create each series at 0: Prometheus misses the increase of a series that starts with 1.
        self._counts = {
            outcome: metrics.reconciles.labels(name, outcome.__name__)
            for outcome in get_args(Outcome)
        }

    async def run(self) -> None:
        """Reconcile keys until `shut_down`. Run this `concurrency` times."""
        with suppress(ShutDownError):
            while not self._queue.shutting_down:
                await self._process(await self._queue.take())

    def shut_down(self) -> None:
        """Take no more keys; the next leader reconciles the waiting ones."""
        self._queue.shut_down()

    async def _process(self, key: K) -> None:
        started = self._clock()
        try:
            outcome = await self._outcome(key)
            self._settle(key, outcome, self._clock() - started)
        finally:
            self._queue.done(key)

    def _settle(self, key: K, outcome: Outcome, seconds: float) -> None:
        """Turn an outcome into a queue operation, a metric and a log line."""
        result = type(outcome)
        self._counts[result].inc()
        if result is not Postponed:
            self._metrics.reconcile_seconds.labels(self.name, result.__name__).observe(seconds)
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
            case Postponed(after):
                queue.add_after(key, after)
            case Retry(error, wait):
                queue.add_rate_limited(key, at_least=wait)
                # A conflict with another writer is normal, unlike the other errors.
                write_line = log.debug if isinstance(error, SupersededError) else log.warning
                write_line("retried later", **self._key_fields(key), error=str(error), after=wait)
            case Terminal(error, wait):
                queue.forget(key)
                if wait is not None:
                    queue.add_after(key, wait)
                log.warning("refused until it changes", **self._key_fields(key), error=str(error))
            case _:
                assert_never(outcome)

    async def _outcome(self, key: K) -> Outcome:
        delay = self._server_throttle.delay(key)
        if delay is not None:
            return Postponed(delay)
        try:
            return await self._reconciler.attempt(key)
        except UnavailableError as error:
            if error.retry_after is not None:
                self._server_throttle.record(key, error.retry_after)
            return Retry(error, error.retry_after)
        except (NameConflictError, RejectedError) as error:
            # The next Plan may repeat the refused write, so a short delay would be a hot loop.
            return Retry(error, FORBIDDEN_RETRY)
        except (SupersededError, ApiError, NotLeader) as error:
            return Retry(error)
        except Exception as error:
            self._metrics.reconcile_panics.inc()
            log.exception("a bug in the controller; please report it", **self._key_fields(key))
            return Retry(error)

    def _key_fields(self, key: K) -> dict[str, str]:
        return {self.name: key_text(key)}


class Throttle(Generic[K]):
    """Delays an action that follows another too closely. `clock` is monotonic, in seconds.

    Holds a time for each key since its last action, at most one for each existing object.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next: dict[K, float] = {}

    def delay(self, key: K) -> float | None:
        """Return the seconds until the next action; None if it may begin now."""
        until = self._next.get(key)
        if until is None:
            return None
        remaining = until - self._clock()
        if remaining > 0:
            return remaining
        del self._next[key]
        return None

    def record(self, key: K, interval: float) -> None:
        """Record an action. The next one may begin after `interval` seconds."""
        self._next[key] = self._clock() + interval

    def forget(self, key: K) -> None:
        """Do not delay the next action: the object is gone or replaced."""
        self._next.pop(key, None)


def log_fields(kind: str, about: UserObject) -> dict[str, str]:
    """Return the fields that identify a job or a queue in log lines; `kind` is the first key."""
    meta = about.metadata
    return {kind: key_text((meta.namespace, meta.name)), "uid": meta.uid}


def key_text(key: Hashable) -> str:
    """Format a key for log lines: namespace/name."""
    return "/".join(key) if isinstance(key, tuple) else str(key)
