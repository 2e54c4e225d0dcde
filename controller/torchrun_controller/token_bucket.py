"""Token buckets by key: how often something may be done for each of many."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct

K = TypeVar("K", bound=Hashable)


class Rate(Struct, frozen=True):
    """So many at once, and so many a second in the long run."""

    per_second: float
    burst: float


class _Bucket(Struct):
    tokens: float
    filled: float


class Buckets(Generic[K]):
    """A bucket for each key, full at first. `clock` is monotonic, in seconds.

    At most `kept` are remembered. Those that are full again are dropped as others are used.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float], kept: int = 10_000) -> None:
        self._rate = rate
        self._clock = clock
        self._kept = kept
        self._buckets: OrderedDict[K, _Bucket] = OrderedDict()  # the one used longest ago is first

    def __len__(self) -> int:
        return len(self._buckets)

    def may_take(self, key: K) -> bool:
        """Whether the key's bucket has a token."""
        bucket = self._buckets.get(key)
        return bucket is None or self._level(bucket) >= 1

    def take(self, key: K) -> None:
        """Take a token out of the key's bucket, which must have one."""
        bucket = self._buckets.pop(key, None)
        level = self._rate.burst if bucket is None else self._level(bucket)
        self._buckets[key] = _Bucket(level - 1, self._clock())
        while len(self._buckets) > self._kept or self._oldest_is_full():
            self._buckets.popitem(last=False)

    def _level(self, bucket: _Bucket) -> float:
        earned = (self._clock() - bucket.filled) * self._rate.per_second
        return min(self._rate.burst, bucket.tokens + earned)

    def _oldest_is_full(self) -> bool:
        oldest = next(iter(self._buckets.values()))
        return self._level(oldest) >= self._rate.burst
