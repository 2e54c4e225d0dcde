"""Rate limits: token buckets for one key or for each of many, and the backoff of failed keys.

Sources: client-go flowcontrol and util/workqueue, which limit the same way.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct

K = TypeVar("K", bound=Hashable)


class Rate(Struct, frozen=True):
    """`burst` actions at once, and `per_second` actions in the long run."""

    per_second: float
    burst: float


class TokenBucket:
    """One bucket, full at first. `clock` is monotonic, in seconds."""

    __slots__ = ("_clock", "_counted_at", "_rate", "_tokens")

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._tokens = rate.burst  # below zero: reserved tokens
        self._counted_at = clock()

    def level(self) -> float:
        """Return the number of tokens: at most the burst, negative after reservations."""
        new_tokens = (self._clock() - self._counted_at) * self._rate.per_second
        return min(self._rate.burst, self._tokens + new_tokens)

    def reserve(self) -> float:
        """Take a token, or reserve a future one; return the seconds until it is available."""
        self._tokens, self._counted_at = self.level() - 1, self._clock()
        return max(0.0, -self._tokens / self._rate.per_second)


class TokenBuckets(Generic[K]):
    """A bucket for each key. `clock` is monotonic, in seconds.

    At most `size` buckets are stored; the least recently used is dropped first. A full bucket is
    dropped too, because a new bucket is full.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float], size: int = 10_000) -> None:
        self._rate = rate
        self._clock = clock
        self._size = size
        self._buckets: OrderedDict[K, TokenBucket] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._buckets)

    def has_token(self, key: K) -> bool:
        """Whether `take` would succeed."""
        bucket = self._buckets.get(key)
        return bucket is None or bucket.level() >= 1

    def take(self, key: K) -> bool:
        """Take a token of the key; return False if it has none."""
        bucket = self._buckets.pop(key, None) or TokenBucket(self._rate, self._clock)
        self._buckets[key] = bucket
        has_token = bucket.level() >= 1
        if has_token:
            bucket.reserve()
        while self._buckets and (len(self._buckets) > self._size or self._oldest_is_full()):
            self._buckets.popitem(last=False)
        return has_token

    def _oldest_is_full(self) -> bool:
        return next(iter(self._buckets.values())).level() >= self._rate.burst


class RateLimit(Struct, frozen=True):
    """The backoff of failed keys, in seconds; the defaults are client-go's."""

    base: float = 0.005  # after the first failure of a key, doubled after each other one
    longest: float = 1000.0
    overall: Rate = Rate(per_second=10.0, burst=100)  # of all keys together


CLIENT_GO = RateLimit()


class RateLimiter(Generic[K]):
    """The later of a per-key exponential backoff and an overall token bucket."""

    def __init__(self, clock: Callable[[], float], limit: RateLimit) -> None:
        self._limit = limit
        self._failures: dict[K, int] = {}  # at least 1 each
        self._bucket = TokenBucket(limit.overall, clock)

    def delay(self, key: K, at_least: float | None = None) -> float:
        """Count a failure of the key; return the seconds until it may be retried.

        `at_least` is the server's Retry-After in seconds. It replaces the overall bucket, because
        the server limits all of its clients.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # 2^63 exceeds any bound; a larger exponent would overflow.
        backoff = min(self._limit.base * 2.0 ** min(failures, 63), self._limit.longest)
        return max(backoff, self._bucket.reserve() if at_least is None else at_least)

    def failures(self, key: K) -> int:
        """Return the number of failures of the key since the last `forget`."""
        return self._failures.get(key, 0)

    def forget(self, key: K) -> None:
        """Drop the key's failures, after a success or when its object is gone."""
        self._failures.pop(key, None)
