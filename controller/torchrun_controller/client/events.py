"""Events of jobs and queues (events.k8s.io/v1): best effort, written in a task of their own.

`record` returns at once and reports no result. A failed write is retried for a while; the other
events wait. A repetition of (type, reason, message) within the window becomes a series on the first
event instead of another object. A token bucket for each object bounds storms, with client-go's
figures: a burst of 25, then one each 5 minutes.
"""

import math
import os
import secrets
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus

import anyio
import msgspec
import structlog
from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import UserObject, kind_of
from torchrun_controller.client import ApiError, Disconnected, Requests
from torchrun_controller.client.apply import MERGE_PATCH, LeaderCheck
from torchrun_controller.rate_limit import Rate, TokenBuckets
from torchrun_controller.reconcile.model.plan import Event

REPORTING_CONTROLLER = "torchrun.ai/controller"

WINDOW = 360.0  # seconds within which a repetition joins its series
RATE = Rate(per_second=1 / 300, burst=25)  # of the events regarding one object
MAX_QUEUED = 1000
MAX_SERIES = 4096
MAX_NOTE = 1024  # bytes, the API server's limit
MAX_TRIES = 8  # of one write: 90 s in all
INITIAL_PAUSE = 1.0  # seconds after the first try, doubled after each other one
MAX_PAUSE = 30.0

log = structlog.get_logger(__name__)

Key = tuple[str, str, str, str]  # UID of the object, type, reason, message


class _Series(Struct):
    """One Event object and how often it happened."""

    namespace: str
    name: str
    body: JsonObject
    last: float
    last_time: datetime
    count: int = 1
    posted: bool = False
    queued: bool = False
    failures: int = 0  # in a row


class EventRecorder:
    """Call `record` from anywhere, run `run` in a task, call `shut_down` at the end.

    Bounded: at most 1,000 events wait, and 4,096 series and objects are remembered; the oldest are
    dropped first.
    """

    def __init__(
        self,
        transport: Requests,
        leader: LeaderCheck,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        instance: str = "",
    ) -> None:
        self._transport = transport
        self._leader = leader
        self._clock = clock
        self._now = now
        self._instance = instance or f"{socket.gethostname()}-{os.getpid()}"[:128]
        self._series: OrderedDict[Key, _Series] = OrderedDict()
        self._buckets: TokenBuckets[str] = TokenBuckets(RATE, clock, MAX_SERIES)
        self._queue: deque[_Series] = deque()
        self._wake = anyio.Event()
        self._stopping = anyio.Event()
        self._deadline = math.inf  # no write begins later
        self.dropped = 0

    def record(self, regarding: UserObject, event: Event) -> None:
        """Queue an event of this object. Never waits and never raises."""
        uid = regarding.metadata.uid
        if not self._buckets.take(uid):
            self.dropped += 1
            return
        key = (uid, event.type, event.reason, event.message)
        now = self._clock()
        series = self._series.get(key)
        if series is not None and now - series.last < WINDOW:
            series.count += 1
        else:
            series = self._new_series(regarding, event)
            self._store_series(key, series)
        series.last, series.last_time = now, self._now()
        self._series.move_to_end(key)
        self._enqueue(series)

    async def run(self) -> None:
        """Write events until `shut_down`."""
        while True:
            await self._wait()
            if not self._queue or self._clock() >= self._deadline:
                return
            if pause := await self._write_next():
                with anyio.move_on_after(pause):
                    await self._stopping.wait()

    def shut_down(self, seconds: float) -> None:
        """Let `run` write waiting events, begin no write after this many seconds, and return."""
        self._deadline = self._clock() + seconds
        self._stopping.set()
        self._wake.set()

    def _new_series(self, regarding: UserObject, event: Event) -> _Series:
        kind, meta = kind_of(regarding), regarding.metadata
        name = f"{meta.name}.{secrets.token_hex(8)}"
        time = self._now()
        body: JsonObject = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": meta.namespace},
            "eventTime": _format_time(time),
            "reportingController": REPORTING_CONTROLLER,
            "reportingInstance": self._instance,
            "action": "Reconcile",
            "type": event.type,
            "reason": event.reason,
            "note": _truncate(event.message),
            "regarding": {
                "apiVersion": kind.api_version,
                "kind": kind.kind,
                "namespace": meta.namespace,
                "name": meta.name,
                "uid": meta.uid,
            },
        }
        return _Series(meta.namespace, name, body, self._clock(), time)

    def _store_series(self, key: Key, series: _Series) -> None:
        self._series[key] = series
        expiry = self._clock() - WINDOW  # older series accept no more events
        while next(iter(self._series.values())).last <= expiry or len(self._series) > MAX_SERIES:
            self._series.popitem(last=False)

    def _enqueue(self, series: _Series) -> None:
        if series.queued:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._queue.popleft().queued = False
            self.dropped += 1
        series.queued = True
        self._queue.append(series)
        self._wake.set()

    async def _wait(self) -> None:
        while not self._queue and math.isinf(self._deadline):
            self._wake = anyio.Event()
            await self._wake.wait()

    async def _write_next(self) -> float:
        """Write the next event; return the seconds to pause afterwards."""
        series = self._queue.popleft()
        series.queued = False
        try:
            self._leader.check()
            await self._write(series)
        except (ApiError, Disconnected) as error:
            if (
                _is_retryable(error)
                and series.failures + 1 < MAX_TRIES
                and math.isinf(self._deadline)
            ):
                return self._requeue(series, error)
            self.dropped += 1
            is_forbidden = isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN
            write_line = log.warning if is_forbidden else log.debug
            write_line("event not written", event_name=series.name, error=str(error))
        except Exception:
            self.dropped += 1
            log.debug("event not written", event_name=series.name, exc_info=True)
        series.failures = 0
        return 0.0

    def _requeue(self, series: _Series, error: ApiError | Disconnected) -> float:
        """Put the event at the head of the queue; return the seconds to pause."""
        retry_after = error.retry_after or 0.0 if isinstance(error, ApiError) else 0.0
        pause = max(retry_after, min(INITIAL_PAUSE * 2.0**series.failures, MAX_PAUSE))
        series.failures += 1
        if not series.queued:  # not recorded again meanwhile
            series.queued = True
            self._queue.appendleft(series)
        return pause

    async def _write(self, series: _Series) -> None:
        if series.posted and await self._patch(series):
            return
        # New, or expired: the API server deletes events after an hour.
        body = series.body if series.count == 1 else {**series.body, "series": _series(series)}
        try:
            await self._send("POST", self._collection(series), body)
        except ApiError as error:
            # The name is random, so the object is ours: the answer to an earlier POST was lost.
            if error.status != 409:
                raise
            if series.count > 1:
                await self._patch(series)
        series.posted = True

    async def _patch(self, series: _Series) -> bool:
        """Update the count of an Event; return whether it existed."""
        path = f"{self._collection(series)}/{series.name}"
        try:
            await self._send("PATCH", path, {"series": _series(series)})
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _collection(self, series: _Series) -> str:
        return f"/apis/events.k8s.io/v1/namespaces/{series.namespace}/events"

    async def _send(self, method: str, path: str, body: JsonObject) -> None:
        await self._transport.request(
            method,
            path,
            body=msgspec.json.encode(body),
            content_type=MERGE_PATCH if method == "PATCH" else "application/json",
        )


def _is_retryable(error: ApiError | Disconnected) -> bool:
    """Whether the same write may succeed later; a refused event does not."""
    return isinstance(error, Disconnected) or error.status == 429 or error.status >= 500


def _series(series: _Series) -> JsonObject:
    # The API server refuses a series of fewer than 2.
    return {"count": max(2, series.count), "lastObservedTime": _format_time(series.last_time)}


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _truncate(message: str) -> str:
    if len(message.encode()) <= MAX_NOTE:
        return message
    return message.encode()[: MAX_NOTE - 3].decode(errors="ignore") + "..."
