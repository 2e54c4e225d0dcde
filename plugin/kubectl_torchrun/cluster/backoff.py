"""Back-off: how often and how long a failed request is retried."""

import random
from collections.abc import Callable
from typing import NamedTuple


class Retries(NamedTuple):
    """Seconds. Delays grow from `first` to `longest`; it ends after `give_up` without progress."""

    first: float = 0.5
    factor: float = 2.0
    longest: float = 15.0
    give_up: float = 300.0

    def delay(self, failures: int, chance: Callable[[], float] = random.random) -> float:
        """Seconds to wait after this number of consecutive failures (from 1), with jitter."""
        full = min(self.longest, self.first * self.factor ** min(failures - 1, 30))
        return full * (0.5 + 0.5 * chance())


PATIENT = Retries()
