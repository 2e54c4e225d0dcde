"""Work queue of keys with client-go's semantics: deduplicated, prioritised, delayed, rate limited.

Only keys are queued, never objects: a reconcile reads the newest state.

Guarantees:

- **No key is lost.** After `add(key)` a later `get` returns the key. Several adds before that `get`
  count as one.
- **No key is processed twice at once.** `get` does not return a key between its `get` and `done`.
  If the key is added meanwhile, `done` puts it at the end of its line.
- **Order.** The highest priority first, and first in, first out within a priority. An add with a
  higher priority moves a waiting key to the end of the higher line; an add with a lower priority
  does not move it. Priorities are strict: keys with `INITIAL` (-100, for initial lists and relists)
  wait for all others, so that an edit during a restart does not wait for 10,000 unchanged objects.
- **Delay.** `add_after` keeps the earliest deadline of a key; when it passes, the key is added. A
  success (`forget` between `get` and `done`) drops the deadline from before the `get`, because the
  reconcile has decided again. Otherwise `done` restores it: a deadline is never missed.
- **Rate limit**, for failures only. `add_rate_limited` waits 5 ms x 2^n, at most 1000 s, where n is
  the number of the key's failures since `forget`, and until the overall bucket (10/s, burst 100)
  has a token. A Retry-After of the server replaces the bucket. A success calls `forget`.
- **Shutdown.** `shut_down` ignores further adds and drops deadlines. Waiting keys can still be
  taken, also those that were added during their processing. Then `take` raises.
- **Standby.** `retain` drops keys of deleted objects from the queue of a standby.

Bounds: a key is at most once in a line and once among the deadlines, so the queue is bounded by the
number of keys in use. Failure counts stay until `forget`.

`WorkQueue` is synchronous, knows no event loop, and gets its clock (seconds, monotonic) as an
argument. `AsyncWorkQueue` adds `take`. Neither is thread-safe: one event loop owns the queue.

Source: client-go util/workqueue (queue, delaying queue, default rate limiters) and
controller-runtime's priority queue.
"""

import asyncio  # for the timer and the yield of `take`
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import anyio

from torchrun_controller.rate_limit import CLIENT_GO, RateLimit, RateLimiter

K = TypeVar("K", bound=Hashable)

INITIAL = -100
"""Priority of keys that come from an initial list or a relist."""


class WorkQueueObserver(Protocol):
    """Receives counts and durations (seconds)."""

    def added(self) -> None:
        """A key was added that was not waiting yet."""

    def dequeued(self, waited: float) -> None:
        """A key was taken, `waited` seconds after its add."""

    def finished(self, worked: float) -> None:
        """The processing of a key ended after `worked` seconds."""

    def retried(self) -> None:
        """A key failed and was added with the rate limit."""


class ShutDownError(Exception):
    """The queue was shut down and nothing is left to take."""


class DelayHeap(Generic[K]):
    """A heap of keys by deadline (seconds of the queue's clock), each key once."""

    def __init__(self) -> None:
        # Each entry has one pair in the heap. A pair with another deadline than its entry is stale.
        # `_sweep` removes stale pairs once they outnumber the entries.
        self._entries: dict[K, tuple[float, int]] = {}  # deadline, priority
        self._heap: list[tuple[float, int, K]] = []  # (deadline, sequence, key)
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, deadline: float, priority: int) -> None:
        """Add a deadline. If the key has one, keep the earlier one, and the higher priority."""
        entry = self._entries.get(key)
        if entry is not None:
            priority = max(priority, entry[1])
            if entry[0] <= deadline:
                self._entries[key] = (entry[0], priority)
                return
        self._entries[key] = (deadline, priority)
        self._sequence += 1
        heapq.heappush(self._heap, (deadline, self._sequence, key))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._sweep()

    def first(self) -> float | None:
        """Return the earliest deadline; None if there is none."""
        while self._heap:
            deadline, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry[0] == deadline:
                return deadline
            heapq.heappop(self._heap)
        return None

    def pop(self) -> tuple[K, int]:
        """Remove the key of the deadline that `first` returned; return it with its priority."""
        _, _, key = heapq.heappop(self._heap)
        return key, self._entries.pop(key)[1]

    def remove(self, key: K) -> tuple[float, int] | None:
        """Remove and return the deadline of the key and its priority; None without one."""
        entry = self._entries.pop(key, None)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._sweep()
        return entry

    def retain(self, keep: Callable[[K], bool]) -> None:
        """Drop the deadlines of keys for which `keep` is false."""
        self._entries = {key: entry for key, entry in self._entries.items() if keep(key)}
        self._sweep()

    def clear(self) -> None:
        """Drop every deadline."""
        self._entries.clear()
        self._heap.clear()

    def _sweep(self) -> None:
        entries = enumerate(self._entries.items())
        self._heap = [(deadline, sequence, key) for sequence, (key, (deadline, _)) in entries]
        heapq.heapify(self._heap)


class WorkQueue(Generic[K]):
    """The synchronous queue; the module's docstring is its contract."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        limit: RateLimit = CLIENT_GO,
        observer: WorkQueueObserver | None = None,
    ) -> None:
        self._clock = clock
        self._observer = observer
        self._limiter: RateLimiter[K] = RateLimiter(clock, limit)
        # Keys that need to be processed, with the priority and the time of the add. Such a key is
        # in exactly one line, or in none while it is also in `_processing`.
        self._dirty: dict[K, tuple[int, float]] = {}
        # One line for each priority, the oldest key first. No line is empty.
        self._lines: dict[int, OrderedDict[K, None]] = {}
        # Keys between `get` and `done`, with the time of `get`.
        self._processing: dict[K, float] = {}
        self._delayed: DelayHeap[K] = DelayHeap()
        # The deadlines, with priorities, that keys in process had before `get`.
        self._suspended: dict[K, tuple[float, int]] = {}
        self._stopping = False

    def add(self, key: K, priority: int = 0) -> None:
        """Add the key. No effect if it waits at this priority or a higher one."""
        if self._stopping:
            return
        entry = self._dirty.get(key)
        if entry is not None:
            if priority > entry[0]:
                self._raise_priority(key, entry, priority)
            return
        self._dirty[key] = (priority, self._clock())
        if self._observer is not None:
            self._observer.added()
        if key not in self._processing:
            self._append_to_line(key, priority)

    def add_after(self, key: K, seconds: float, priority: int = 0) -> None:
        """Add the key after this many seconds, or at its earlier deadline."""
        if self._stopping:
            return
        if seconds <= 0:
            self.add(key, priority)
            return
        self._put_deadline(key, self._clock() + seconds, priority)

    def add_rate_limited(self, key: K, priority: int = 0, *, at_least: float | None = None) -> None:
        """Add the key again after a failure, as the rate limit allows.

        `at_least` is the server's Retry-After in seconds, None without one.
        """
        if self._stopping:
            return
        if self._observer is not None:
            self._observer.retried()
        self.add_after(key, self._limiter.delay(key, at_least), priority)

    def get(self) -> K | None:
        """Return the next key, to be passed to `done` later; None if no key is ready."""
        self._promote()
        if not self._lines:
            return None
        priority = max(self._lines)
        line = self._lines[priority]
        key, _ = line.popitem(last=False)
        if not line:
            del self._lines[priority]
        _, added = self._dirty.pop(key)
        now = self._clock()
        self._processing[key] = now
        deadline = self._delayed.remove(key)
        if deadline is not None:
            self._suspended[key] = deadline
        if self._observer is not None:
            self._observer.dequeued(now - added)
        return key

    def done(self, key: K) -> None:
        """End the processing of a key from `get`. Raises KeyError if it is not in process."""
        start = self._processing.pop(key)
        deadline = self._suspended.pop(key, None)
        if deadline is not None:
            self._put_deadline(key, *deadline)
        if self._observer is not None:
            self._observer.finished(self._clock() - start)
        entry = self._dirty.get(key)
        if entry is not None:
            self._append_to_line(key, entry[0])

    def retain(self, keep: Callable[[K], bool]) -> None:
        """Drop keys for which `keep` is false, whether they wait or have a deadline.

        A standby calls this. It takes no keys, so its queue would grow with every deleted object.
        """
        waiting = [key for key in self._dirty if key not in self._processing]
        for key in waiting:
            if not keep(key):
                self._remove_from_line(key, self._dirty.pop(key)[0])
        self._delayed.retain(keep)

    def forget(self, key: K) -> None:
        """Drop the key's failures, after a success or when its object is gone.

        Also drop its deadline from before `get`.
        """
        self._limiter.forget(key)
        self._suspended.pop(key, None)

    def failures(self, key: K) -> int:
        """Return the number of failures of the key since the last `forget`."""
        return self._limiter.failures(key)

    def next_ready(self) -> float | None:
        """Return the seconds until a key can be taken, 0 for now, None if no key is queued."""
        return 0.0 if self._lines else self._next_deadline()

    def shut_down(self) -> None:
        """Ignore further adds and drop deadlines; waiting keys can still be taken."""
        self._stopping = True
        self._delayed.clear()
        self._suspended.clear()

    @property
    def shutting_down(self) -> bool:
        """Whether `shut_down` was called."""
        return self._stopping

    def __len__(self) -> int:
        """Return the number of keys that need to be processed (client-go's depth)."""
        return len(self._dirty)

    @property
    def delayed(self) -> int:
        """The number of keys that wait for a deadline."""
        return len(self._delayed)

    def unfinished(self) -> tuple[float, float]:
        """Return the seconds that keys have been in process: the sum, and the longest."""
        now = self._clock()
        ages = [now - start for start in self._processing.values()]
        return sum(ages), max(ages, default=0.0)

    def _put_deadline(self, key: K, deadline: float, priority: int) -> None:
        before = self._delayed.first()
        self._delayed.put(key, deadline, priority)
        if before is None or deadline < before:
            self._reset_timer()

    def _next_deadline(self) -> float | None:
        deadline = self._delayed.first()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _promote(self) -> None:
        while (deadline := self._delayed.first()) is not None and deadline <= self._clock():
            self.add(*self._delayed.pop())

    def _raise_priority(self, key: K, entry: tuple[int, float], priority: int) -> None:
        self._dirty[key] = (priority, entry[1])
        if key in self._processing:
            return
        self._remove_from_line(key, entry[0])
        self._append_to_line(key, priority)

    def _remove_from_line(self, key: K, priority: int) -> None:
        line = self._lines[priority]
        del line[key]
        if not line:
            del self._lines[priority]

    def _append_to_line(self, key: K, priority: int) -> None:
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = OrderedDict()
        line[key] = None
        self._wake_taker()

    def _wake_taker(self) -> None:
        """Wake a task that waits for a key. Called when a key joins a line; here a no-op."""

    def _reset_timer(self) -> None:
        """Set the timer again. Called when the earliest deadline moves forward; here a no-op."""


class AsyncWorkQueue(WorkQueue[K]):
    """The queue for tasks of one event loop: `take` waits without polling.

    Each key that joins a line wakes one sleeping taker. A taker that is cancelled after its wake-up
    wakes another one. So while a key can be taken, a taker is awake.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        limit: RateLimit = CLIENT_GO,
        observer: WorkQueueObserver | None = None,
    ) -> None:
        super().__init__(clock, limit=limit, observer=observer)
        self._takers: deque[anyio.Event] = deque()  # asleep, or cancelled while asleep
        # Set while takers sleep and keys have deadlines. anyio has no timer without a task, and a
        # timeout for each taker would wake all of them at each deadline.
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> K:
        """Wait for the next key, to be passed to `done` later.

        Yields to the event loop at least once, so that busy controllers cannot starve watches and
        the lease. Raises ShutDownError once the queue is shut down and empty. A cancelled call
        takes no key.
        """
        await asyncio.sleep(0)  # anyio's checkpoint looks up the event loop first, for each key
        while (key := self.get()) is None:
            if self.shutting_down:
                raise ShutDownError
            await self._wait_for_wakeup()
        return key

    def shut_down(self) -> None:
        """Ignore further adds, drop deadlines, and wake every taker."""
        super().shut_down()
        self._set_timer()
        while self._takers:
            self._wake_taker()

    async def _wait_for_wakeup(self) -> None:
        taker = anyio.Event()
        self._takers.append(taker)
        self._set_timer()
        try:
            await taker.wait()
        except anyio.get_cancelled_exc_class():
            if taker.is_set():
                self._wake_taker()  # another taker must take the key
            else:
                self._takers.remove(taker)
            raise

    def _wake_taker(self) -> None:
        if self._takers:
            self._takers.popleft().set()

    def _reset_timer(self) -> None:
        if self._takers:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = self._next_deadline()
        if seconds is not None:
            # uvloop rounds to whole milliseconds, so a shorter delay would be a busy loop.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(seconds, 0.001), self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        self._promote()
        if self._takers:
            self._set_timer()
