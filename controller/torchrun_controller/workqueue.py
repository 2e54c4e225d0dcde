"""Work queue of keys with client-go's semantics: deduplicated, prioritised, delayed, rate limited.

Only keys are queued, never objects: a reconcile reads the newest state.

Guarantees:

- **Nothing is lost.** After `add(key)` the key is taken at least once more, by a `get` that begins
  after the add. Adds in between collapse into that one.
- **Never twice at once.** A key that is being processed is not handed out again before `done`. An
  add in the meantime marks it; `done` puts a marked key back at the end of its line.
- **Order.** The highest priority first, first in first out within a priority. An add with a higher
  priority raises a waiting key (to the end of the higher line), a lower one does not sink it.
  Priorities are strict: `INITIAL` (-100, for the initial list and relists) waits while anything
  else is there, so that an edit made during a restart is not behind 10,000 unchanged objects.
- **Delay.** `add_after` keeps one deadline per key, the earliest; when it passes, the key is added.
  An `add` in between does not cancel it: a deadline may cause a needless reconcile, never miss one.
- **Rate limit**, for failures only. `add_rate_limited` waits 5 ms x 2^n, at most 1000 s, where n
  counts the key's failures since `forget`, or until the overall bucket (10/s, burst 100) has a
  token, whichever is later. A wait that the server asked for replaces the bucket.
  A success calls `forget`.
- **Shutdown.** `shut_down` ignores further adds and drops deadlines. What waits is still handed
  out, and a key marked before the shutdown is still put back by `done`; then `take` raises.
- **Standby.** `retain` drops keys of deleted objects from a queue that nobody takes from.

Bounds: a key is at most once in a line and once among the deadlines, so the queue is bounded by the
number of keys in use. Failures are kept until `forget`.

`WorkQueue` is synchronous, knows no event loop, and gets its clock (seconds, monotonic) as an
argument. `AsyncWorkQueue` adds `take`. Neither is thread-safe: one event loop owns the queue.

Source: client-go util/workqueue (queue, delaying queue, default rate limiters) and
controller-runtime's priority queue.
"""

import asyncio  # for one timer
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from torchrun_controller.rate_limit import CLIENT_GO, RateLimit, RateLimiter

K = TypeVar("K", bound=Hashable)

INITIAL = -100
"""Priority of keys that come from an initial list or a relist."""


class Observer(Protocol):
    """Receives counts and durations (seconds)."""

    def added(self) -> None:
        """A key was added that was not waiting yet."""

    def taken(self, waited: float) -> None:
        """A key was handed out, this long after its add."""

    def finished(self, worked: float) -> None:
        """A key was given back, this long after it was handed out."""

    def retried(self) -> None:
        """A key failed and was added with the rate limit."""


class ShutDownError(Exception):
    """The queue was shut down and nothing is left to take."""


class Delayed(Generic[K]):
    """Keys with a deadline each, the earliest first."""

    def __init__(self) -> None:
        # The deadline and the priority that count. Every key here has its pair in the heap; pairs
        # in the heap that differ are stale. Stale ones are swept out once they outnumber the rest.
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # (deadline, number, key)
        self._number = 0

    def __len__(self) -> int:
        return len(self._due)

    def put(self, key: K, deadline: float, priority: int) -> None:
        """Keep the earlier deadline and the higher priority of the two."""
        held = self._due.get(key)
        if held is not None:
            priority = max(priority, held[1])
            if held[0] <= deadline:
                self._due[key] = (held[0], priority)
                return
        self._due[key] = (deadline, priority)
        self._number += 1
        heapq.heappush(self._heap, (deadline, self._number, key))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._sweep()

    def first(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            deadline, _, key = self._heap[0]
            held = self._due.get(key)
            if held is not None and held[0] == deadline:
                return deadline
            heapq.heappop(self._heap)
        return None

    def pop(self) -> tuple[K, int]:
        """Remove the key of the deadline that `first` returned; return it with its priority."""
        _, _, key = heapq.heappop(self._heap)
        return key, self._due.pop(key)[1]

    def retain(self, keep: Callable[[K], bool]) -> None:
        """Drop the deadlines of keys that are not to be kept."""
        self._due = {key: due for key, due in self._due.items() if keep(key)}
        self._sweep()

    def clear(self) -> None:
        """Drop every deadline."""
        self._due.clear()
        self._heap.clear()

    def _sweep(self) -> None:
        due = enumerate(self._due.items())
        self._heap = [(deadline, number, key) for number, (key, (deadline, _)) in due]
        heapq.heapify(self._heap)


class WorkQueue(Generic[K]):
    """The synchronous queue; see the contract of the module."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        limit: RateLimit = CLIENT_GO,
        observer: Observer | None = None,
    ) -> None:
        self._clock = clock
        self._observer = observer
        self._limiter: RateLimiter[K] = RateLimiter(clock, limit)
        # Keys that need to be processed, with priority and time of the add. A key here waits in
        # exactly one line, unless it is being processed too: then it is marked, and in no line.
        self._dirty: dict[K, tuple[int, float]] = {}
        # One line a priority, oldest first. No line is empty.
        self._lines: dict[int, OrderedDict[K, None]] = {}
        # Keys that were handed out and not given back, with the time they were taken.
        self._processing: dict[K, float] = {}
        self._delayed: Delayed[K] = Delayed()
        self._stopping = False

    def add(self, key: K, priority: int = 0) -> None:
        """Have the key processed; no effect if it waits at this priority or a higher one."""
        if self._stopping:
            return
        held = self._dirty.get(key)
        if held is not None:
            if priority > held[0]:
                self._raise(key, held, priority)
            return
        self._dirty[key] = (priority, self._clock())
        if self._observer is not None:
            self._observer.added()
        if key not in self._processing:
            self._line_up(key, priority)

    def add_after(self, key: K, seconds: float, priority: int = 0) -> None:
        """Add the key after this many seconds; of several deadlines the earliest counts."""
        if self._stopping:
            return
        if seconds <= 0:
            self.add(key, priority)
            return
        before = self._delayed.first()
        deadline = self._clock() + seconds
        self._delayed.put(key, deadline, priority)
        if before is None or deadline < before:
            self._earlier()

    def add_rate_limited(self, key: K, priority: int = 0, *, at_least: float | None = None) -> None:
        """Add the key again after a failure, when the rate limit allows.

        `at_least` is the wait in seconds that the server asked for, if it did.
        """
        if self._stopping:
            return
        if self._observer is not None:
            self._observer.retried()
        self.add_after(key, self._limiter.delay(key, at_least), priority)

    def get(self) -> K | None:
        """Hand out the next key, to be given back by `done`; None if none is ready."""
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
        if self._observer is not None:
            self._observer.taken(now - added)
        return key

    def done(self, key: K) -> None:
        """Give back a key from `get`. Raises KeyError if it is not being processed."""
        taken = self._processing.pop(key)
        if self._observer is not None:
            self._observer.finished(self._clock() - taken)
        marked = self._dirty.get(key)
        if marked is not None:
            self._line_up(key, marked[0])

    def retain(self, keep: Callable[[K], bool]) -> None:
        """Drop keys for which `keep` is false, waiting or with a deadline.

        For a standby, which takes no keys: its queue would grow with every object that ever
        existed.
        """
        waiting = [key for key in self._dirty if key not in self._processing]
        for key in waiting:
            if not keep(key):
                self._leave_line(key, self._dirty.pop(key)[0])
        self._delayed.retain(keep)

    def forget(self, key: K) -> None:
        """Drop the key's failures; called on success and when its object is gone."""
        self._limiter.forget(key)

    def failures(self, key: K) -> int:
        """Failures of the key since it was last forgotten."""
        return self._limiter.failures(key)

    def next_ready(self) -> float | None:
        """Seconds until a key can be taken: 0 if one can now, None if nothing is to come."""
        return 0.0 if self._lines else self._next_deadline()

    def shut_down(self) -> None:
        """Ignore further adds and drop deadlines; what waits can still be taken."""
        self._stopping = True
        self._delayed.clear()

    @property
    def shutting_down(self) -> bool:
        """Whether `shut_down` was called."""
        return self._stopping

    def __len__(self) -> int:
        """Keys that need to be processed, the marked ones included (client-go's depth)."""
        return len(self._dirty)

    @property
    def delayed(self) -> int:
        """Keys that wait for a deadline."""
        return len(self._delayed)

    def unfinished(self) -> tuple[float, float]:
        """Seconds that keys are being processed for: the sum over all of them, and the longest."""
        now = self._clock()
        ages = [now - taken for taken in self._processing.values()]
        return sum(ages), max(ages, default=0.0)

    def _next_deadline(self) -> float | None:
        deadline = self._delayed.first()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _promote(self) -> None:
        while (deadline := self._delayed.first()) is not None and deadline <= self._clock():
            self.add(*self._delayed.pop())

    def _raise(self, key: K, held: tuple[int, float], priority: int) -> None:
        self._dirty[key] = (priority, held[1])
        if key in self._processing:
            return
        self._leave_line(key, held[0])
        self._line_up(key, priority)

    def _leave_line(self, key: K, priority: int) -> None:
        line = self._lines[priority]
        del line[key]
        if not line:
            del self._lines[priority]

    def _line_up(self, key: K, priority: int) -> None:
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = OrderedDict()
        line[key] = None
        self._ready()

    def _ready(self) -> None:
        """Called whenever a key joins a line."""

    def _earlier(self) -> None:
        """Called whenever the earliest deadline moves forward."""


class AsyncWorkQueue(WorkQueue[K]):
    """The queue for tasks of one event loop: `take` waits without polling.

    Every key that joins a line wakes one waiting taker. A taker that is woken and then cancelled
    passes the wake-up on. So while a key can be taken, a taker is awake.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        limit: RateLimit = CLIENT_GO,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(clock, limit=limit, observer=observer)
        self._takers: deque[anyio.Event] = deque()  # asleep, or cancelled while asleep
        # While takers sleep and keys are delayed. anyio has no timer without a task, and a time-out
        # for each taker would wake all of them at each deadline.
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> K:
        """Wait for the next key, to be given back by `done`.

        Yields to the event loop at least once, so that busy controllers cannot starve watches and
        the lease. Raises ShutDownError once the queue is shut down and empty. A cancelled taker
        takes no key.
        """
        await anyio.lowlevel.checkpoint()
        while (key := self.get()) is None:
            if self.shutting_down:
                raise ShutDownError
            await self._sleep()
        return key

    def shut_down(self) -> None:
        """Ignore further adds, drop deadlines, and wake every taker."""
        super().shut_down()
        self._arm()
        while self._takers:
            self._ready()

    async def _sleep(self) -> None:
        taker = anyio.Event()
        self._takers.append(taker)
        self._arm()
        try:
            await taker.wait()
        except anyio.get_cancelled_exc_class():
            if taker.is_set():
                self._ready()  # woken for a key that another taker must take now
            else:
                self._takers.remove(taker)
            raise

    def _ready(self) -> None:
        if self._takers:
            self._takers.popleft().set()

    def _earlier(self) -> None:
        if self._takers:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = self._next_deadline()
        if seconds is not None:
            # uvloop rounds to whole milliseconds: without the floor it would spin below one.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(seconds, 0.001), self._due)

    def _due(self) -> None:
        self._timer = None
        self._promote()
        if self._takers:
            self._arm()
