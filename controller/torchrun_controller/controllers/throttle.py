"""A minimum time between two actions on the same key."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


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
