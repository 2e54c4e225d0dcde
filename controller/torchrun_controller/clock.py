"""What time it is, and chance where waits shall differ: given to all parts, so that tests can."""

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct


def _monotonic() -> float:
    # A lease runs out while the machine sleeps, too: the usual clock stands still then.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _wall() -> datetime:
    return datetime.now(UTC)


class Clock(Struct, frozen=True):
    """`monotonic` in seconds, `wall` the time of day in UTC, `jitter` random in [0, 1)."""

    monotonic: Callable[[], float] = _monotonic
    wall: Callable[[], datetime] = _wall
    jitter: Callable[[], float] = random.random

    def second(self) -> datetime:
        """The time of day as objects of the API have it: in whole seconds."""
        return self.wall().replace(microsecond=0)


SYSTEM = Clock()
