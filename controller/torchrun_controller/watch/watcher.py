"""List and watch of one kind as a state machine: no clock, no socket, no randomness of its own.

              longer than some pages
    LISTING ----------------------> STREAM_LISTING
       |    <----------------------   |
       |      refused by an old       |       LISTING, 410 on a later page: once more, unpaged
       |      server, or broken       |
       |  last page                   |  initial-events-end
       +---------> WATCHING <---------+
                          |  ^ |
         ended, broken    |  | |  410, error in the stream, refused
         after a while    +--+ |
                               v
                          BACKING_OFF ---> WATCHING (busy or unreachable server), else a new list

Guarantees:
- A short list takes one round trip; a long one is streamed, which costs the server least.
- Every list is a consistent read. An incomplete list has no effect, and a watch never continues
  from the resourceVersion of one (its events are not in order).
- A refused resourceVersion is not used again.
- Between two failures there is always a delay.
- An unusable frame affects only its own object.

A watch that is silent for 90 s is opened again, because it may be dead. While nothing has changed
since an API server's start, it sends no bookmarks to older watches, but one a minute to a watch
that was opened since (measured with 1.35).

Facts: client-go's reflector, https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

import enum
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from torchrun_api.kinds.resources import Kind, Object
from torchrun_controller.watch.codec import Bookmark, Codec, NotAList, ServerError, identity_of
from torchrun_controller.watch.events import (
    Action,
    Bookmarked,
    Deleted,
    Event,
    Faulted,
    FetchPage,
    Interrupted,
    Key,
    OpenStream,
    StreamFailure,
    Synced,
    Upserted,
    WatchPause,
)
from torchrun_controller.watch.lines import MAX_LINE, LineSplitter, Overlong

T = TypeVar("T", bound=Object)

_GONE = 410
_TOO_MANY_REQUESTS = 429
_NO_ANSWER = 0
_FORBIDDEN = 403
_REASONS = {
    _NO_ANSWER: "Unreached",
    _TOO_MANY_REQUESTS: "Throttled",
    _GONE: "Expired",
    _FORBIDDEN: "Forbidden",
}
# The server ends a streamed list after 1 to 1.25 s without changes (measured with 1.35).
# A page of 500 pods takes a tenth of that, but a list of many pages costs the server memory.
PLAIN_PAGES = 4
# HTTP codes of servers without sendInitialEvents, or with it disabled.
_NOT_SUPPORTED = frozenset({400, 422, 501})


class WatchState(enum.Enum):
    """States of a watcher; see the diagram of the module."""

    STREAM_LISTING = "StreamListing"
    LISTING = "Listing"
    WATCHING = "Watching"
    BACKING_OFF = "BackingOff"


class Timings(Struct, frozen=True):
    """Seconds. client-go's defaults, except for `healthy_after` and `unreached_cap`.

    client-go resets its back-off 120 s after the last failure, with a cap of 30 s for all failures:
    with a server that fails once a minute, its delays reach a minute. Here 30 s of an open stream
    reset the back-off, and the cap is lower for a server that is not reached, because retries do
    not load it.
    """

    backoff: float = 0.8
    backoff_cap: float = 30.0
    unreached_cap: float = 8.0
    healthy_after: float = 30.0
    short_lived: float = 1.0
    watch: float = 300.0
    silence: float = 90.0
    grace: float = 30.0
    page: float = 60.0
    retry_after_cap: float = 60.0


CLIENT_GO = Timings()


class Backoff:
    """Delays that double up to a cap, with jitter; reset after a healthy period."""

    def __init__(self, timings: Timings, random: Callable[[], float], cap: float) -> None:
        self._timings = timings
        self._random = random
        self._cap = cap
        self._next = timings.backoff
        self._healthy_since: float | None = None

    def healthy(self, now: float) -> None:
        """Record that the server works at `now`, unless an earlier time is recorded."""
        if self._healthy_since is None:
            self._healthy_since = now

    def delay(self, now: float) -> float:
        """Return the seconds to wait after a failure at `now`."""
        since, self._healthy_since = self._healthy_since, None
        if since is not None and now - since > self._timings.healthy_after:
            self._next = self._timings.backoff
        base = self._next
        self._next = min(2 * base, self._cap)
        return base * (1.0 + self._random())


class Watcher(Generic[T]):
    """The state machine: its driver carries out the action of `next` and passes back the result.

    Wait: sleep. FetchPage: call `page` with the body, or `failed`. OpenStream: call `opened`, then
    `receive` with each chunk until it returns Interrupted, then `closed`, or `failed`. `random`
    returns numbers in [0, 1); `now` is a monotonic clock in seconds. A list of more than
    `plain_pages` pages is streamed; with 0 every list is.
    """

    def __init__(
        self,
        kind: Kind[T],
        random: Callable[[], float],
        *,
        label_selector: str = "",
        field_selector: str = "",
        timings: Timings = CLIENT_GO,
        max_line: int = MAX_LINE,
        page_size: int = 500,
        plain_pages: int = PLAIN_PAGES,
    ) -> None:
        self.kind = kind
        self._list_state = WatchState.LISTING if plain_pages else WatchState.STREAM_LISTING
        self.state = self._list_state
        self._codec = Codec(kind.type)
        selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        self._selector = {name: value for name, value in selectors.items() if value}
        self._random = random
        self._timings = timings
        self._max_line = max_line
        self._page_size = page_size
        self._backoff = Backoff(timings, random, timings.backoff_cap)
        self._unreached = Backoff(timings, random, timings.unreached_cap)

        self._stream_lists = True  # False once the server refused a streamed list
        self._plain_pages = plain_pages
        self._pages_left: float = plain_pages  # pages of this list before it is streamed
        self._resume = self._list_state
        self._resume_at = 0.0
        # The list that is being received; its events are returned at its end.
        self._objects: dict[Key, T] = {}
        self._unreadable: set[Key] = set()
        self._continue = ""
        self._limit = page_size
        # The stream that is open.
        self._lines = LineSplitter(max_line)
        self._opened_at: float | None = None
        self._has_events = False
        # resourceVersion from which a watch continues; set by complete lists and by WATCHING only.
        self._version = 0

    def next(self, now: float) -> Action:
        """Return the action to carry out at `now`."""
        self._opened_at = None
        if self.state is WatchState.BACKING_OFF:
            if now < self._resume_at:
                return WatchPause(self._resume_at - now)
            self.state = self._resume
        if self.state is WatchState.LISTING:
            page = {"limit": str(self._limit)} if self._limit else {}
            token = {"continue": self._continue} if self._continue else {}
            return FetchPage(self._selector | page | token, self._timings.page)
        seconds = int(self._timings.watch * (1.0 + self._random()))
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        if self.state is WatchState.WATCHING:
            query["resourceVersion"] = str(self._version)
        else:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        total = seconds + self._timings.grace
        return OpenStream(self._selector | query, self._timings.silence, total)

    def page(self, body: bytes, now: float) -> list[Event[T]]:
        """Process one page of a LIST."""
        try:
            page = self._codec.page(body)
        except NotAList as error:
            message = (
                f"the answer to a list of {self.kind.resource} is not a Kubernetes list: {error}"
            )
            return [self._back_off(now, "NotAList", message)]
        for obj in page.objects:
            self._objects[obj.metadata.namespace, obj.metadata.name] = obj
        self._unreadable |= {fault.key for fault in page.faults}
        self._continue = page.next
        self._pages_left -= 1
        if page.next and self._stream_lists and self._pages_left <= 0:
            self._enter(WatchState.STREAM_LISTING)
            return []
        if page.next:
            return [*page.faults]
        return [*page.faults, self._finish_list(page.resource_version)]

    def record_open(self, now: float) -> None:
        """Record that the server has accepted a watch."""
        self._opened_at = now
        self._backoff.healthy(now)
        self._unreached.healthy(now)
        self._lines = LineSplitter(self._max_line)
        self._has_events = False

    def receive(self, chunk: bytes, now: float) -> list[Event[T]]:
        """Process bytes of the watch. After an Interrupted, close the stream."""
        events: list[Event[T]] = []
        for line in self._lines.feed(chunk):
            event = self._decode_line(line, now)
            if event is not None:
                events.append(event)
            if isinstance(event, Interrupted):
                break
        return events

    def closed(self, now: float) -> list[Event[T]]:
        """Record that the server ended the watch, as it does every few minutes."""
        return self._end_stream(
            now, "Closed", f"the server ended the watch of {self.kind.resource}"
        )

    def failed(self, failure: StreamFailure, now: float) -> list[Event[T]]:
        """Record that a list or watch was refused, or failed before its end."""
        status = failure.status
        if self.state is WatchState.STREAM_LISTING and status in _NOT_SUPPORTED:
            self._stream_lists = False
            self._enter(WatchState.LISTING)
            return []
        if self.state is WatchState.LISTING and status == _GONE and self._continue:
            self._enter(WatchState.LISTING, limit=0)
            return []
        if status == _NO_ANSWER and self._opened_at is not None:
            is_silent = failure.silent and self.state is WatchState.WATCHING
            reason = Interrupted.SILENT if is_silent else "Broken"
            return self._end_stream(now, reason, failure.message)
        reason = _REASONS.get(status, "Refused")
        relist = status not in (_NO_ANSWER, _TOO_MANY_REQUESTS)
        retry_after = failure.retry_after or 0.0
        return [self._back_off(now, reason, failure.message, relist=relist, at_least=retry_after)]

    def _decode_line(self, line: bytes | Overlong, now: float) -> Event[T] | None:
        if isinstance(line, Overlong):
            message = f"larger than the {self._max_line} bytes that one event of a watch may have"
            return self._record_fault(Faulted(identity_of(line.head), message))
        frame = self._codec.frame(line)
        if isinstance(frame, Faulted):
            return self._record_fault(frame)
        if isinstance(frame, ServerError):
            reason = "Expired" if frame.code == _GONE else "ServerError"
            message = f"{frame.code} {frame.reason}: {frame.message}"
            return self._back_off(now, reason, message, at_least=frame.retry_after or 0.0)
        self._has_events = True
        if self.state is WatchState.STREAM_LISTING:
            return self._collect(frame)
        self._version = frame.resource_version
        return Bookmarked(frame.resource_version) if isinstance(frame, Bookmark) else frame

    def _collect(self, frame: Upserted[T] | Deleted | Bookmark) -> Event[T] | None:
        if isinstance(frame, Upserted):
            key = (frame.object.metadata.namespace, frame.object.metadata.name)
            self._objects[key] = frame.object
            self._unreadable.discard(key)
            return None
        if isinstance(frame, Deleted):
            self._objects.pop(frame.key, None)
            self._unreadable.discard(frame.key)
            return None
        if frame.initial_events_end:
            return self._finish_list(frame.resource_version)
        # A bookmark before the end of the list comes from a server without streamed lists.
        self._stream_lists = False
        self._enter(WatchState.LISTING)
        return Interrupted("NotSupported", "the server streams no lists", 0.0, relist=True)

    def _record_fault(self, fault: Faulted) -> Faulted:
        if self.state is WatchState.STREAM_LISTING:
            self._unreadable.add(fault.key)
        return fault

    def _finish_list(self, resource_version: int) -> Synced[T]:
        synced = Synced(list(self._objects.values()), resource_version, frozenset(self._unreadable))
        self._enter(WatchState.WATCHING)  # drops the references to the objects
        self._version = resource_version
        return synced

    def _end_stream(self, now: float, reason: str, message: str) -> list[Event[T]]:
        assert self._opened_at is not None, "a stream ends after it was opened"
        if self.state is WatchState.STREAM_LISTING:
            # A list in pages may succeed: each page is smaller than the stream.
            interrupted = self._back_off(now, reason, message)
            self._resume, self._pages_left = WatchState.LISTING, math.inf
            return [interrupted]
        if now - self._opened_at < self._timings.short_lived:
            return [self._back_off(now, reason, message, relist=not self._has_events)]
        if reason == "Closed":
            return []
        return [Interrupted(reason, message, 0.0, relist=False)]

    def _back_off(
        self, now: float, reason: str, message: str, *, relist: bool = True, at_least: float = 0.0
    ) -> Interrupted:
        relist = relist or self.state is not WatchState.WATCHING
        backoff = self._unreached if reason == "Unreached" and not relist else self._backoff
        delay = max(backoff.delay(now), min(at_least, self._timings.retry_after_cap))
        self._enter(WatchState.BACKING_OFF)
        first_state = self._list_state if self._stream_lists else WatchState.LISTING
        self._resume = first_state if relist else WatchState.WATCHING
        self._resume_at = now + delay
        return Interrupted(reason, message, delay, relist)

    def _enter(self, state: WatchState, limit: int | None = None) -> None:
        self.state = state
        self._objects = {}
        self._unreadable = set()
        self._pages_left = self._plain_pages
        self._continue = ""
        self._limit = self._page_size if limit is None else limit
