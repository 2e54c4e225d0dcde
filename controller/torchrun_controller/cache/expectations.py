"""Expectations: resourceVersions that the caches must reach before a key is reconciled again."""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from torchrun_controller.client.apply import WriteResult


class Versioned(Protocol):
    """The part of a store that shows how current it is."""

    @property
    def resource_version(self) -> int:
        """The newest resourceVersion that the cache reflects."""


K = TypeVar("K", bound=Hashable)

# Seconds. A dead watch is noticed after 90 s of silence, and a list follows. A decision before that
# may delete a gang whose Job is not in the cache yet.
EXPECTATION_TIMEOUT = 120.0


class _Pending(Struct):
    versions: dict[str, int]
    since: float


class Expectations(Generic[K]):
    """Stores the newest resourceVersion of a key's writes for each kind.

    A key must not be reconciled before the caches show its own writes. `caches` returns the caches
    of a key's objects by resource. `timeout` (seconds) limits the wait for a version that does not
    come, for instance after a restore of etcd. Bounded by the keys whose caches are behind.
    """

    def __init__(
        self,
        caches: Callable[[K], Mapping[str, Versioned]],
        clock: Callable[[], float],
        timeout: float = EXPECTATION_TIMEOUT,
    ) -> None:
        self._caches = caches
        self._clock = clock
        self._timeout = timeout
        self._pending: dict[K, _Pending] = {}

    def expect(self, key: K, result: WriteResult | None) -> None:
        """Expect the resourceVersion of a write in the cache of its kind."""
        if result is None or not result.resource_version:
            return
        resource, version = result.kind.resource, int(result.resource_version)
        if resource not in self._caches(key):
            return
        now = self._clock()
        pending = self._pending.setdefault(key, _Pending({}, now))
        pending.versions[resource] = max(version, pending.versions.get(resource, 0))
        pending.since = now

    def behind(self, key: K) -> float | None:
        """Return the longest time to wait for the caches, in seconds; None if they are current."""
        pending = self._pending.get(key)
        if pending is None:
            return None
        seconds_left = pending.since + self._timeout - self._clock()
        caches = self._caches(key)
        if seconds_left > 0 and any(
            caches[resource].resource_version < version
            for resource, version in pending.versions.items()
        ):
            return seconds_left
        del self._pending[key]
        return None

    def __len__(self) -> int:
        return len(self._pending)
