"""The simulated network between a controller and the API server: latency, watches and faults.

A `Client` is one process on the network. Its transports have the interface of
`torchrun_controller.client.Transport`. `Faults` decide about each request and each watch event. A
dead client sends nothing more, even if its tasks still run.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Struct

from bodies import Body
from faults.api_server import ApiServer, Target, Write, refuse, target_of
from faults.selectors import matching
from faults.store import Change, short_name
from torchrun_controller.client import ApiError, Disconnected, Response
from torchrun_controller.client.session import resource_of

T = TypeVar("T")

LATENCY = 0.002  # seconds, one way
BOOKMARKS = 50.0  # seconds between two bookmarks of a watch; about a minute on a real server
_encode = msgspec.json.Encoder().encode
_NONE: Mapping[str, str] = {}


class Call(Struct, frozen=True):
    """A request in flight, as seen by faults."""

    client: "Client"
    session: str
    method: str  # WATCH for one that opens a stream
    path: str
    timeout: float

    @property
    def about(self) -> str:
        """The object in short form, without the namespace."""
        target = target_of(self.path) if self.path.count("/") > 1 else None
        if target is None:
            return self.path
        name = short_name(target.resource[1], target.name) if target.name else target.resource[1]
        return f"{name}/{target.subresource}" if target.subresource else name


class RequestFault:
    """No fault of one request. Overridden steps may raise, wait, or kill the client."""

    async def sent(self, call: Call) -> None:
        """The request leaves the client."""

    async def carried_out(self, call: Call) -> None:
        """The server has processed it and sends the response."""

    def received(self, call: Call) -> None:
        """The client receives the response."""


class EventFault:
    """No fault of one watch event."""

    async def arrives(self, stream: "Stream", change: Change) -> bytes | None:
        """The event is about to be delivered. A returned frame replaces it."""


class Faults(Protocol):
    """No faults. `skew`: the clock skew of the controllers."""

    skew: timedelta

    def request(self, call: Call) -> RequestFault:
        """The fault of this request."""

    def event(self, stream: "Stream", change: Change) -> EventFault:
        """The fault of this event."""

    def as_of(self, call: Call) -> tuple[int, float] | None:
        """The version of the answering server, and the seconds for which it stays there."""


class Client:
    """One process. `ended` is called once when it dies."""

    def __init__(self, name: str, server: ApiServer, faults: Faults) -> None:
        self.name = name
        self.server = server
        self.faults = faults
        self.alive = True
        self.ended: Callable[[], None] = lambda: None

    def kill(self) -> None:
        """From now on it neither sends nor receives."""
        if self.alive:
            self.alive = False
            self.ended()

    def session(
        self, name: str, observe: Callable[[str, str, int, float], None] = lambda *_: None
    ) -> "Transport":
        """A transport. `observe` is called for each request, as in a real session."""
        return Transport(self, name, observe)

    async def unless_dead(self) -> None:
        """Wait forever if the client is dead."""
        if not self.alive:
            await _never()


class Transport:
    """Requests and streams of one session."""

    def __init__(
        self, client: Client, name: str, observe: Callable[[str, str, int, float], None]
    ) -> None:
        self._client = client
        self._name = name
        self._observe = observe

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = _NONE,
        body: bytes | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] = _NONE,
        timeout: float = 30.0,  # noqa: ASYNC109 the interface of the real one
    ) -> Response:
        """Send one request. Raises ApiError and Disconnected."""
        call = Call(self._client, self._name, method, path, timeout)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._exchange(
                    call, lambda: self._answer(call, query, body, content_type, headers)
                )
        except TimeoutError as error:
            self._observed(call, 0)
            raise Disconnected(f"{method} {path}: timed out") from error
        return answer

    async def read_list(
        self,
        path: str,
        *,
        query: Mapping[str, str] = _NONE,
        headers: Mapping[str, str] = _NONE,
        timeout: float = 60.0,  # noqa: ASYNC109 the interface of the real one
    ) -> Response:
        """Read a list. Raises as `request` does."""
        return await self.request("GET", path, query=query, headers=headers, timeout=timeout)

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float = 90.0, total: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch. Opening and iterating raise as `request` does."""
        call = Call(self._client, self._name, "WATCH", path, total)
        opened = await self._exchange(call, lambda: Stream(call, query, silence))
        try:
            yield opened
        finally:
            opened.close()

    async def _exchange(self, call: Call, carry_out: Callable[[], T]) -> T:
        client = self._client
        try:
            await client.unless_dead()
            fault = client.faults.request(call)
            await fault.sent(call)
            await asyncio.sleep(LATENCY)
            await client.unless_dead()
            answer = carry_out()
            await fault.carried_out(call)
            await asyncio.sleep(LATENCY)
            await client.unless_dead()
            fault.received(call)
        except ApiError as error:
            await asyncio.sleep(LATENCY)
            self._observed(call, error.status)
            raise
        except Disconnected:
            self._observed(call, 0)
            raise
        self._observed(call, 200)
        return answer

    def _observed(self, call: Call, code: int) -> None:
        verb = {"WATCH": "watch"}.get(call.method, call.method.lower())
        self._observe(verb, resource_of(call.path), code, LATENCY)

    def _answer(
        self,
        call: Call,
        query: Mapping[str, str],
        body: bytes | None,
        content_type: str,
        headers: Mapping[str, str],
    ) -> Response:
        server = self._client.server
        if call.path == "/apis":
            return _discovery(server, headers)
        target = target_of(call.path)
        if call.method == "GET":
            behind = self._client.faults.as_of(call)
            as_of = behind[0] if behind else None
            answer = server.get(target) if target.name else server.list(target, query, as_of)
        else:
            sent = msgspec.json.decode(body or b"{}")
            answer = server.write(
                Write(call.method, target, query, sent, content_type, self._client.name)
            )
        return Response(200, _encode(answer))


class Stream(AsyncIterator[bytes]):
    """A watch for its client, one frame in each chunk."""

    def __init__(self, call: Call, query: Mapping[str, str], silence: float) -> None:
        self.call = call
        self.target: Target = target_of(call.path)
        self._server = call.client.server
        self._query = query
        self._match = matching(query)
        self._silence = silence
        self._frames: deque[tuple[float, bytes, Change | None]] = deque()
        self._arrived = asyncio.Event()
        self._lag = 0.0
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + float(query.get("timeoutSeconds", "inf"))
        self._bookmarks = query.get("allowWatchBookmarks") == "true"
        self._begin(query)
        self._server.store.subscribe(self._changed)

    def close(self) -> None:
        """Close the stream."""
        self._server.store.unsubscribe(self._changed)

    async def __anext__(self) -> bytes:
        await self.call.client.unless_dead()
        while not self._frames:
            await self._wait()
            if not self._frames and self._loop.time() >= self._ends:
                raise StopAsyncIteration
        due, frame, change = self._frames.popleft()
        if due > (now := self._loop.time()):
            await asyncio.sleep(due - now)
        if change is not None:
            frame = await self.call.client.faults.event(self, change).arrives(self, change) or frame
        await self.call.client.unless_dead()
        return frame

    def drop(self) -> NoReturn:
        """The connection breaks."""
        raise Disconnected(f"WATCH {self.call.path}: connection reset")

    def put_next(self, frame: bytes) -> None:
        """Insert a frame before all waiting ones."""
        self._frames.appendleft((0.0, frame, None))

    async def _wait(self) -> None:
        """Wait for a frame, or a bookmark after a long silence."""
        self._arrived.clear()
        patience = min(BOOKMARKS, self._silence, self._ends - self._loop.time())
        try:
            async with asyncio.timeout(patience):
                await self._arrived.wait()
        except TimeoutError:
            if self._bookmarks and self._loop.time() < self._ends:
                self._push(_bookmark(self._server.store.version))

    def _begin(self, query: Mapping[str, str]) -> None:
        store, version = self._server.store, query.get("resourceVersion")
        behind = self.call.client.faults.as_of(self.call)
        if behind is not None:
            self._begin_behind(*behind, listed=version is not None)
            return
        if version is not None:
            if int(version) < self._server.compacted:
                self._push(error_frame(410, "Expired"))
                return
            for change in store.changes:
                if change.version > int(version):
                    self._changed(change)
            return
        for body in store.bodies(self.target.resource, self.target.namespace):
            if self._match(body):
                self._push(_frame(b"ADDED", _encode(body)))
        if query.get("sendInitialEvents") == "true":
            self._push(_bookmark(store.version, initial_events_end=True))

    def _begin_behind(self, version: int, seconds: float, *, listed: bool) -> None:
        """A lagging server: it shows the past, unless it was listed, and later changes after a delay."""
        store = self._server.store
        if not listed:
            for body in self._server.list(self.target, self._query, version)["items"]:
                self._push(_frame(b"ADDED", _encode(body)))
            self._push(_bookmark(version, initial_events_end=True))
        self._lag = seconds
        for change in store.changes:
            if change.version > version:
                self._changed(change)
        self._loop.call_later(seconds, self._catch_up)

    def _catch_up(self) -> None:
        self._lag = 0.0

    def _changed(self, change: Change) -> None:
        namespace = change.body["metadata"].get("namespace", "")
        if change.resource != self.target.resource or self.target.namespace not in ("", namespace):
            return
        before = change.old is not None and self._match(change.old)
        after = change.verb != "DELETED" and self._match(change.body)
        if before or after:
            verb = "DELETED" if not after else "MODIFIED" if before else "ADDED"
            self._push(_frame(verb.encode(), change.text), change)

    def _push(self, frame: bytes, change: Change | None = None) -> None:
        self._frames.append((self._loop.time() + LATENCY + self._lag, frame, change))
        self._arrived.set()


async def _never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


def error_frame(code: int, reason: str) -> bytes:
    """The error frame with which a server ends a watch."""
    status = {"kind": "Status", "code": code, "reason": reason, "message": "too old"}
    return _frame(b"ERROR", _encode(status))


def _frame(verb: bytes, text: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (verb, text)


def _bookmark(version: int, *, initial_events_end: bool = False) -> bytes:
    meta: Body = {"resourceVersion": str(version)}
    if initial_events_end:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    return _frame(b"BOOKMARK", _encode({"metadata": meta}))


def _discovery(server: ApiServer, headers: Mapping[str, str]) -> Response:
    """The aggregated discovery document with the installed gang schedulers."""
    if headers.get("If-None-Match") == '"same"':
        refuse(304, "NotModified", "")
    groups: dict[str, dict[str, list[str]]] = {}
    for api_version, plural in server.installed:
        group, _, version = api_version.partition("/")
        groups.setdefault(group, {}).setdefault(version, []).append(plural)
    items = [
        {
            "metadata": {"name": group},
            "versions": [
                {"version": version, "resources": [{"resource": each} for each in plurals]}
                for version, plurals in versions.items()
            ],
        }
        for group, versions in groups.items()
    ]
    return Response(200, _encode({"kind": "APIGroupDiscoveryList", "items": items}), '"same"')
