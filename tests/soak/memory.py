"""Whether a process grows: its resident memory over time, and a linear fit."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

EVERY = 5.0  # seconds between two samples
WARM_UP = 1 / 6  # share of the time in which the heap warms up
BLOCKS = 10
STUDENT = 2.306  # 97.5 % of Student's t with BLOCKS - 2 degrees of freedom
LEAST = 20 * 60.0  # seconds; a slope over a shorter time has no meaning


class Sample(NamedTuple):
    """`at`: seconds since the start."""

    at: float
    mib: float
    files: int


class Trend(NamedTuple):
    """MiB an hour with its 95 % interval, and the residuals' standard deviation in MiB."""

    slope: float
    low: float
    high: float
    noise: float

    @property
    def is_flat(self) -> bool:
        """Whether the interval contains zero, or memory shrinks."""
        return self.low <= 0

    def as_dict(self) -> dict[str, float | bool]:
        """The values of a result, in MiB and hours."""
        named = {"per_hour": self.slope, "from": self.low, "to": self.high, "noise": self.noise}
        return {**{name: round(x, 2) for name, x in named.items()}, "is_flat": self.is_flat}


def sample(pid: int, since: float) -> Sample:
    """A sample of a running process. `since`: a monotonic time."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            return Sample(time.monotonic() - since, int(line.split()[1]) / 1024, files)
    raise ProcessLookupError(pid)


def trend(samples: Sequence[Sample], value: Callable[[Sample], float] | None = None) -> Trend:
    """Least squares over the samples after the warm-up.

    Neighbouring samples are correlated, so the interval is computed from the means of ten blocks,
    which are nearly independent.
    """
    value = value or (lambda each: each.mib)
    rest = samples[round(len(samples) * WARM_UP) :]
    times, values = [each.at / 3600 for each in rest], [value(each) for each in rest]
    line = statistics.linear_regression(times, values)
    noise = statistics.pstdev(
        [v - line.intercept - line.slope * t for t, v in zip(times, values, strict=True)]
    )
    bounds = [round(len(rest) * block / BLOCKS) for block in range(BLOCKS + 1)]
    blocks = [slice(low, high) for low, high in pairwise(bounds)]
    x = [statistics.fmean(times[block]) for block in blocks]
    y = [statistics.fmean(values[block]) for block in blocks]
    fitted = statistics.linear_regression(x, y)
    left = sum((b - fitted.intercept - fitted.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    middle = statistics.fmean(x)
    error = math.sqrt(left / (BLOCKS - 2) / sum((a - middle) ** 2 for a in x))
    return Trend(line.slope, line.slope - STUDENT * error, line.slope + STUDENT * error, noise)
