"""Faults and the points where they are injected.

A point is the n-th request or the n-th watch event of one name in a run, for any process of the
controller. Names are stable: a run without faults gives the points of all runs.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeAlias

from msgspec import Struct

from faults.api_server import target_of
from faults.network import Call, Client, EventFault, RequestFault, Stream, error_frame
from faults.store import Change
from torchrun_controller.client import ApiError, Disconnected

LATE = 20.0  # seconds; a lease lasts 15 s, and the controller waits 10 s for events of its writes


class Point(Struct, frozen=True, order=True):
    """`what` is "<session> <verb> <object>", or "event <verb> <object>"; `number` counts from 1."""

    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.what} #{self.number}"

    @property
    def is_event(self) -> bool:
        return self.what.startswith("event ")


class CrashBefore(RequestFault):
    """The process dies before it sends the request."""

    async def sent(self, call: Call) -> None:
        call.client.kill()
        await call.client.unless_dead()


class CrashAfterCommit(RequestFault):
    """The process dies after the server has processed the request, before the response."""

    async def carried_out(self, call: Call) -> None:
        call.client.kill()
        await call.client.unless_dead()


class CrashAfterAnswer(RequestFault):
    """The process dies after it has received the response."""

    def received(self, call: Call) -> None:
        call.client.kill()


class Refused(RequestFault):
    """The server refuses the request."""

    def __init__(
        self,
        code: int,
        reason: str,
        retry_after: float | None = None,
        message: str = "by a fault",
    ) -> None:
        self._answer = (code, reason, message, retry_after)

    async def sent(self, call: Call) -> None:
        raise ApiError(*self._answer)


class TimedOut(RequestFault):
    """The request gets lost and has no response."""

    async def sent(self, call: Call) -> None:
        await asyncio.sleep(min(call.timeout, 30.0))
        raise Disconnected(f"{call.method} {call.path}: timed out by a fault")


class Dropped(RequestFault):
    """The connection breaks after the server has processed the request."""

    async def carried_out(self, call: Call) -> None:
        raise Disconnected(f"{call.method} {call.path}: reset by a fault")


class RefusedAfterCommit(RequestFault):
    """A gateway times out after the server has processed the request."""

    async def carried_out(self, call: Call) -> None:
        raise ApiError(504, "Timeout", "by a fault", None)


class Late(RequestFault):
    """The response takes longer than the lease duration."""

    async def carried_out(self, call: Call) -> None:
        await asyncio.sleep(LATE)


class DroppedWatch(EventFault):
    """The connection breaks, and the event is lost."""

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        stream.drop()


class Delayed(EventFault):
    """The event and all later ones on this watch are delayed."""

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        await asyncio.sleep(LATE)
        return None


class Relisted(EventFault):
    """The server ends the watch after the event, which causes a new list."""

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        stream.put_next(error_frame(410, "Expired"))
        return None


class Compacted(EventFault):
    """The connection breaks, and the version to resume from is compacted."""

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        server = stream.call.client.server
        server.compacted = max(server.compacted, server.store.version)
        stream.drop()


class Stale(EventFault):
    """The next list comes from another server, which gets the event later."""

    SECONDS = 3.0

    def __init__(self, plan: "FaultPlan") -> None:
        self._plan = plan

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        self._plan.behind[stream.call.path] = (change.version - 1, self.SECONDS)
        return error_frame(410, "Expired")


class Unseen(EventFault):
    """The connection breaks, and lists fail for a time, so the states in between are lost."""

    def __init__(self, plan: "FaultPlan") -> None:
        self._plan = plan

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        loop, server = asyncio.get_running_loop(), stream.call.client.server

        def compact() -> None:
            server.compacted = server.store.version

        self._plan.closed[stream.call.path] = loop.time() + LATE
        loop.call_later(LATE, compact)
        stream.drop()


class AllLag(EventFault):
    """This event and those of all other watches are delayed."""

    def __init__(self, plan: "FaultPlan") -> None:
        self._plan = plan

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        self._plan.trouble = Trouble(LATE, lambda call: True, cuts=False)
        return await self._plan.trouble.arrives(stream, change)


class Trouble(EventFault):
    """A fault that lasts `seconds` for the requests that `hits` selects.

    `cuts` drops them, a `refusal` refuses them instead, and otherwise `delay` is their time.

    Events of affected watches are delayed until its end. With `breaks`, connections break at its
    start.
    """

    def __init__(
        self,
        seconds: float,
        hits: Callable[[Call], bool],
        *,
        cuts: bool = True,
        breaks: bool = False,
        delay: float = 0.0,
        refusal: RequestFault | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + seconds
        self._hits = hits
        self._cuts = cuts
        self._breaks = breaks
        self._delay = delay
        self._refusal = refusal

    @property
    def lasts(self) -> bool:
        return self._loop.time() < self._until

    def request(self, call: Call) -> RequestFault | None:
        """The fault of a request during that time."""
        if not self._hits(call):
            return None
        if self._refusal is not None:
            return self._refusal
        return Unanswered() if self._cuts else Slow(self._delay)

    async def arrives(self, stream: Stream, change: Change) -> bytes | None:
        if self._hits(stream.call):
            if self._breaks:
                stream.drop()
            left = self._until - self._loop.time()
            await asyncio.sleep(self._delay or max(0.0, left))
        return None


class Unanswered(RequestFault):
    """The connection is refused."""

    async def sent(self, call: Call) -> None:
        raise Disconnected(f"{call.method} {call.path}: refused by a fault")


class Slow(RequestFault):
    """The response is slow."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def carried_out(self, call: Call) -> None:
        await asyncio.sleep(self._seconds)


def _reads_many(call: Call) -> bool:
    is_list = call.method == "GET" and call.path != "/apis" and not target_of(call.path).name
    return call.method == "WATCH" or is_list


def _is_no_lease(call: Call) -> bool:
    return call.session != "lease"


def _is_write_of_a_child(call: Call) -> bool:
    """Whether a webhook for Jobs, pods and the other objects of jobs is called."""
    if call.method not in ("PATCH", "DELETE"):
        return False
    target = target_of(call.path)
    return not (target.subresource or target.resource[1] in ("leases", "events", *_USER_OBJECTS))


_USER_OBJECTS = ("torchrunjobs", "torchrunqueues")
_WEBHOOK = 'Internal error occurred: failed calling webhook "policies.example.com": EOF'

OF_REQUESTS: Mapping[str, Callable[[], RequestFault]] = {
    "crash-before": CrashBefore,
    "crash-after-commit": CrashAfterCommit,
    "crash-after-answer": CrashAfterAnswer,
    "409": lambda: Refused(409, "Conflict"),
    "401": lambda: Refused(401, "Unauthorized"),
    "422": lambda: Refused(422, "Invalid"),
    "429": lambda: Refused(429, "TooManyRequests", 2.0),
    "500": lambda: Refused(500, "InternalError"),
    "503": lambda: Refused(503, "ServiceUnavailable", 1.0),
    "504-committed": RefusedAfterCommit,
    "timeout": TimedOut,
    "dropped": Dropped,
    "late": Late,
}
OF_EVENTS: Mapping[str, Callable[["FaultPlan"], EventFault]] = {
    "watch-dropped": lambda _: DroppedWatch(),
    "watch-delayed": lambda _: Delayed(),
    "watch-relisted": lambda _: Relisted(),
    "watch-compacted": lambda _: Compacted(),
    "watch-stale": lambda plan: Stale(plan),
    "watch-unseen": lambda plan: Unseen(plan),
    "watches-lag": lambda plan: AllLag(plan),
}

# Lasting faults start with a request, so they use only some of the points.
LASTING: Mapping[str, Callable[[], Trouble]] = {
    "outage": lambda: Trouble(45.0, lambda call: True, breaks=True),
    "watches-dead": lambda: Trouble(60.0, _reads_many),
    "lease-alone": lambda: Trouble(60.0, _is_no_lease),
    "slow-etcd": lambda: Trouble(60.0, lambda call: True, cuts=False, delay=3.0),
    "webhook-fails": lambda: Trouble(
        60.0,
        _is_write_of_a_child,
        refusal=Refused(500, "InternalError", message=_WEBHOOK),
    ),
}
# From a request on, the controllers have another time of day. They compare it with times of the API
# server, so a clock that is behind delays waits, by at most that difference.
CLOCKS: Mapping[str, timedelta] = {
    "clock-ahead": timedelta(hours=1),
    "clock-back": timedelta(minutes=-2),
}

Planned: TypeAlias = Mapping[Point, str]
NO_REQUEST_FAULT, _NO_EVENT_FAULT = RequestFault(), EventFault()


class FaultPlan:
    """Injects the planned faults, and records all points and injected faults."""

    def __init__(self, planned: Planned | None = None) -> None:
        self.behind: dict[str, tuple[int, float]] = {}  # by path, for the next list and watch
        self.closed: dict[str, float] = {}  # by path, the time until which lists and watches fail
        self.trouble: Trouble | None = None
        self.skew = timedelta()
        self.met: list[Point] = []
        self.struck: list[str] = []
        self._planned = dict(planned or {})
        self._seen: Counter[str] = Counter()

    def request(self, call: Call) -> RequestFault:
        kind = self._meet(f"{call.session} {call.method} {call.about}", call.client)
        if kind is None:
            return self._troubled(call) or NO_REQUEST_FAULT
        if kind in LASTING:
            self.trouble = LASTING[kind]()
        elif kind in CLOCKS:
            self.skew = CLOCKS[kind]
        else:
            return OF_REQUESTS[kind]()
        return self._troubled(call) or NO_REQUEST_FAULT

    def _troubled(self, call: Call) -> RequestFault | None:
        if self.closed.get(call.path, 0.0) > asyncio.get_running_loop().time():
            return Unanswered()
        if self.trouble is None or not self.trouble.lasts:
            return None
        return self.trouble.request(call)

    def event(self, stream: Stream, change: Change) -> EventFault:
        kind = self._meet(f"event {change.verb} {change.name}", stream.call.client)
        if kind:
            return OF_EVENTS[kind](self)
        lasts = self.trouble is not None and self.trouble.lasts
        return self.trouble if self.trouble and lasts else _NO_EVENT_FAULT

    def as_of(self, call: Call) -> tuple[int, float] | None:
        if call.method == "GET":  # the next watch uses the same server
            return self.behind.get(call.path)
        return self.behind.pop(call.path, None)

    def _meet(self, what: str, client: Client) -> str | None:
        self._seen[what] += 1
        point = Point(what, self._seen[what])
        self.met.append(point)
        kind = self._planned.get(point)
        if kind is not None:
            self.struck.append(f"{kind} at {point} of {client.name}")
        return kind
