"""The writes of a controller: they are counted, throttled, and expected in the caches."""

from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import structlog
from msgspec import Struct

from torchrun_api.kinds.resources import Kind, UserObject, kind_of
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.client.apply import Status, WriteResult
from torchrun_controller.controllers import decision_log
from torchrun_controller.controllers.controller import Behind, Throttle
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event

# Seconds. The cache event of a write requeues its key; this covers a missing event.
BEHIND_RETRY = 1.0
STATUS_INTERVAL = 1.0  # seconds between two status writes of an object in the same phase
# A gang of more nodes than this waits a second for each hundred: its counts of pods change often.
_NODES_PER_SECOND = 100
LONGEST_STATUS_INTERVAL = 10.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

K = TypeVar("K", bound=Hashable)


class StatusWriter(Protocol):
    """The part of the Applier that writes status."""

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = ...
    ) -> WriteResult | None:
        """See `Applier.apply_status`."""


class Writer(StatusWriter, Protocol):
    """The part of the Applier that writes objects and status."""

    async def apply(self, intent: Apply) -> WriteResult:
        """See `Applier.apply`."""

    async def delete(self, delete: Delete) -> WriteResult | None:
        """See `Applier.delete`."""


class EventSink(Protocol):
    """The part of the EventRecorder that controllers need."""

    def record(self, regarding: UserObject, event: Event) -> None:
        """See `EventRecorder.record`."""


class Throttled(Struct, frozen=True):
    """The status was not written; retry after this many seconds."""

    seconds: float


class Writes(Generic[K]):
    """The writes of one controller. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        writer: Writer,
        expectations: Expectations[K],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._expectations = expectations
        self._metrics = metrics
        self._throttle: Throttle[K] = Throttle(clock)

    def behind(self, key: K) -> Behind | None:
        """Return Behind while the caches do not show the key's last writes, else None."""
        seconds = self._expectations.behind(key)
        return None if seconds is None else Behind(min(seconds, BEHIND_RETRY))

    async def write(self, key: K, write: Apply | Delete, fields: Mapping[str, str]) -> bool:
        """Apply or delete one object; return whether it was created.

        Raises what the Applier raises. `fields` are those of the log lines.
        """
        object_name = f"{write.kind.kind}/{write.name}"
        if isinstance(write, Delete):
            result = await self._write(key, write.kind, self._writer.delete(write))
            if result is not None:
                log.info("object deleted", **fields, object=object_name)
            elif write.collection:
                log.info("pods deleted", **fields, object=f"Job/{write.name}")
            return False
        result = await self._write(key, write.kind, self._writer.apply(write))
        if result is None or not result.created:
            log.debug("object changed", **fields, object=object_name)
            return False
        line = decision_log.creation_line(write)
        log.info(line.event, **fields, **line.fields)
        return True

    async def write_status(
        self, key: K, owner: UserObject, status: Status
    ) -> WriteResult | Throttled | None:
        """Write the status, unless it is throttled. None if the object is gone.

        A new phase is never throttled.

        Raises what `Applier.apply_status` raises.
        """
        if status.phase == owner.status.phase:
            delay = self._throttle.delay(key)
            if delay is not None:
                return Throttled(delay)
        write = self._writer.apply_status(owner, status)
        result = await self._write(key, kind_of(owner), write)
        # After a failed write, the back-off of the work queue applies.
        self._throttle.record(key, _status_interval(status))
        return result

    def forget(self, key: K) -> None:
        """Do not throttle the next status: the object is gone or replaced."""
        self._throttle.forget(key)

    async def _write(
        self, key: K, kind: Kind[Any], write: Coroutine[None, None, WriteResult | None]
    ) -> WriteResult | None:
        """Await one write for the key, count it, and expect it in the cache."""
        try:
            result = await write
        except Exception as error:
            outcome = type(error).__name__.removesuffix("Error")
            self._metrics.applies.labels(kind.resource, outcome).inc()
            raise
        self._metrics.applies.labels(kind.resource, "Gone" if result is None else "Written").inc()
        self._expectations.expect(key, result)
        return result


def _status_interval(status: Status) -> float:
    """Return the seconds between two status writes in the same phase: more for large gangs."""
    nodes = status.num_nodes or 0 if isinstance(status, TorchrunJobStatus) else 0
    return min(max(STATUS_INTERVAL, nodes / _NODES_PER_SECOND), LONGEST_STATUS_INTERVAL)
