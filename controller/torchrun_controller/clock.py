"""The clock and the source of randomness, passed as arguments so that tests can set them."""

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct


def _monotonic() -> float:
    # A lease also expires while the machine sleeps, when the usual monotonic clock stands still.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _wall() -> datetime:
    return datetime.now(UTC)


class Clock(Struct, frozen=True):
    """`monotonic` in seconds, `wall` the time of day in UTC, `jitter` random in [0, 1)."""

    monotonic: Callable[[], float] = _monotonic
    wall: Callable[[], datetime] = _wall
    jitter: Callable[[], float] = random.random

    def second(self) -> datetime:
        """The time of day in whole seconds, as API objects have it."""
        return self.wall().replace(microsecond=0)


SYSTEM = Clock()
