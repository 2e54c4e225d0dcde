"""Expectations: resourceVersions that the caches must reach before a key is reconciled again."""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from torchrun_controller.client.apply import WriteResult


class Versioned(Protocol):
    """The part of a store that shows how current it is."""

    @property
    def resource_version(self) -> int:
        """The newest resourceVersion that the cache has seen."""


K = TypeVar("K", bound=Hashable)

# Seconds. A dead watch is noticed after 90 s of silence, and a list follows. An earlier decision
# may take a gang for deleted because its Job is not in the cache yet, and end it.
PATIENCE = 120.0


class _Pending(Struct):
    versions: dict[str, int]
    since: float


class Expectations(Generic[K]):
    """Remembers for each key and kind the newest resourceVersion that its writes returned.

    A key must not be reconciled before the caches show its own writes: it would decide from the
    past. `caches` returns the caches of a key's objects by resource. `patience` (seconds) bounds
    the wait for a version that never comes, as after a restore of etcd. Holds an entry only while a
    cache is behind, so it needs no other bound.
    """

    def __init__(
        self,
        caches: Callable[[K], Mapping[str, Versioned]],
        clock: Callable[[], float],
        patience: float = PATIENCE,
    ) -> None:
        self._caches = caches
        self._clock = clock
        self._patience = patience
        self._pending: dict[K, _Pending] = {}

    def note(self, owner: K, written: WriteResult | None) -> None:
        """Expect the version of a write in its cache."""
        if written is None or not written.resource_version:
            return
        resource, version = written.kind.resource, int(written.resource_version)
        if resource not in self._caches(owner):
            return
        now = self._clock()
        pending = self._pending.setdefault(owner, _Pending({}, now))
        pending.versions[resource] = max(version, pending.versions.get(resource, 0))
        pending.since = now

    def behind(self, owner: K) -> float | None:
        """Return the seconds to wait at most for the caches; None when they show all writes."""
        pending = self._pending.get(owner)
        if pending is None:
            return None
        left = pending.since + self._patience - self._clock()
        caches = self._caches(owner)
        if left > 0 and any(
            caches[resource].resource_version < version
            for resource, version in pending.versions.items()
        ):
            return left
        del self._pending[owner]
        return None

    def __len__(self) -> int:
        return len(self._pending)
