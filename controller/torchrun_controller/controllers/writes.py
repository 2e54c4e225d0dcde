"""Writes for the sake of a key: carried out, counted, and remembered until the caches show them."""

from collections.abc import Coroutine, Hashable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import structlog

from torchrun_api.kinds import Kind
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.client.apply import Written
from torchrun_controller.controllers import audit_log
from torchrun_controller.controllers.controller import Behind
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.plan import Apply, Delete

# A cache that reaches our writes wakes the key itself; this is for the case that it never does.
BEHIND_RETRY = 1.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

K = TypeVar("K", bound=Hashable)


class ObjectWriter(Protocol):
    """The part of the Applier that writes whole objects."""

    async def apply(self, intent: Apply) -> Written:
        """See `Applier.apply`."""

    async def delete(self, delete: Delete) -> Written | None:
        """See `Applier.delete`."""


class Writes(Generic[K]):
    """The writes of one controller, each for the sake of a key."""

    def __init__(
        self, applier: ObjectWriter, expectations: Expectations[K], metrics: Metrics
    ) -> None:
        self._applier = applier
        self._expectations = expectations
        self._metrics = metrics

    def behind(self, key: K) -> Behind | None:
        """Whether the caches do not show the key's last writes yet: then nothing may be decided."""
        seconds = self._expectations.behind(key)
        return None if seconds is None else Behind(min(seconds, BEHIND_RETRY))

    async def carry_out(
        self,
        key: K,
        applies: Iterable[Apply],
        deletes: Iterable[Delete],
        about: Mapping[str, str],
    ) -> bool:
        """Apply, then delete, in the Plan's order; whether an object was created.

        Raises what the single writes raise. `about` names in log lines what this is for.
        """
        creates = False
        for intent in applies:
            written = await self.write(key, intent.kind, self._applier.apply(intent))
            if written is not None and written.created:
                creates = True
                line = audit_log.of_creation(intent)
                log.info(line.event, **about, **line.fields)
            else:
                log.debug("object changed", **about, object=f"{intent.kind.kind}/{intent.name}")
        for delete in deletes:
            written = await self.write(key, delete.kind, self._applier.delete(delete))
            if written is not None:
                log.info("object deleted", **about, object=f"{delete.kind.kind}/{delete.name}")
        return creates

    async def write(
        self, key: K, kind: Kind[Any], write: Coroutine[None, None, Written | None]
    ) -> Written | None:
        """Await one write for the key. Raises what it raises."""
        try:
            written = await write
        except Exception as error:
            result = type(error).__name__.removesuffix("Error")
            self._metrics.applies.labels(kind.resource, result).inc()
            raise
        self._metrics.applies.labels(kind.resource, "Gone" if written is None else "Written").inc()
        self._expectations.note(key, written)
        return written
