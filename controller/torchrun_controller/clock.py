"""The clock and the source of randomness. They are arguments, so that tests can replace them."""

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct


def _monotonic() -> float:
    # CLOCK_BOOTTIME also runs while the machine is suspended, as the expiry of a lease does.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _wall() -> datetime:
    return datetime.now(UTC)


class Clock(Struct, frozen=True):
    """`monotonic` in seconds, `wall` the time of day in UTC, `jitter` random in [0, 1)."""

    monotonic: Callable[[], float] = _monotonic
    wall: Callable[[], datetime] = _wall
    jitter: Callable[[], float] = random.random

    def second(self) -> datetime:
        """Return the time of day in whole seconds, the precision of metav1.Time."""
        return self.wall().replace(microsecond=0)


SYSTEM = Clock()
