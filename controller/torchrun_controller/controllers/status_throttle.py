"""How often the status of one object is written."""

import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

STATUS_INTERVAL = 1.0  # seconds between two status writes of an object in the same phase

K = TypeVar("K", bound=Hashable)


class StatusThrottle(Generic[K]):
    """Holds a status back that follows another too closely, unless the phase changes.

    `clock` is monotonic, in seconds. Holds keys of objects that are there, no others.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._written: dict[K, float] = {}

    def held_back(self, key: K, *, same_phase: bool) -> float | None:
        """Return the seconds until a status may be written; None if it may be written now."""
        left = self._written.get(key, -math.inf) + STATUS_INTERVAL - self._clock()
        return left if same_phase and left > 0 else None

    def wrote(self, key: K) -> None:
        """Note that a status was written: a write that failed is left to the queue's backoff."""
        self._written[key] = self._clock()

    def forget(self, key: K) -> None:
        """The object is gone, or is another: the next status is written at once."""
        self._written.pop(key, None)
