"""An informer on a scripted server, with a simulated clock."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from frames import frame, pod, status
from scripted_server import ScriptedServer, Token, connection, json_response, serving, streamed
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.resources import PODS
from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.watch import Timings, Watcher

LIST = "sendInitialEvents"
# The timeout of one wait, in seconds. A passing test never waits this long.
PATIENCE = 120.0

Step = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass
class Clock:
    """A clock that sleep() advances without waiting."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)
    sleeps: asyncio.Queue[float] = field(default_factory=asyncio.Queue)

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.sleeps.put_nowait(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@dataclass
class Observed:
    """Records the calls of an observer."""

    calls: list[tuple[object, ...]] = field(default_factory=list)

    def synced(self, resource: str, objects: int) -> None:
        self.calls.append(("synced", resource, objects))

    def changed(self, resource: str) -> None:
        self.calls.append(("changed", resource))

    def faulted(self, resource: str) -> None:
        self.calls.append(("faulted", resource))

    def interrupted(self, resource: str, reason: str, relist: bool) -> None:
        self.calls.append(("interrupted", resource, reason, relist))


class Play:
    """Answers the n-th request with the n-th step, and later ones with an open watch."""

    def __init__(self, *steps: Step) -> None:
        self.steps = deque(steps)
        self.server: ScriptedServer

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.steps:
            return await self.steps.popleft()(request)
        response = await streamed(request)
        await self.server.hang()
        return response


def sends(*chunks: bytes) -> Step:
    """A watch that sends this and ends."""

    async def step(request: web.BaseRequest) -> web.StreamResponse:
        return await streamed(request, *chunks)

    return step


def breaks(*chunks: bytes) -> Step:
    """A watch that sends this and loses its connection."""

    async def step(request: web.BaseRequest) -> web.StreamResponse:
        response = await streamed(request, *chunks)
        assert request.transport is not None
        request.transport.close()
        return response

    return step


def refuses(code: int, reason: str, **headers: str) -> Step:
    async def step(request: web.BaseRequest) -> web.StreamResponse:
        return json_response(status(code, reason), code, headers)

    return step


def gives(body: bytes) -> Step:
    async def step(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body)

    return step


class Harness:
    """A running informer, its server and its events."""

    def __init__(self, server: ScriptedServer, clock: Clock) -> None:
        self.server = server
        self.clock = clock
        self.observed = Observed()
        self.changes: asyncio.Queue[tuple[str, str, bool]] = asyncio.Queue()
        self.informer: Informer[Pod]

    def on_change(self, change: Change[Pod], initial: bool) -> None:
        verb = "delete" if change.new is None else "add" if change.old is None else "update"
        self.changes.put_nowait((verb, change.object.metadata.name, initial))

    async def next(self) -> tuple[str, str, bool]:
        async with asyncio.timeout(PATIENCE):
            return await self.changes.get()

    @property
    def queries(self) -> list[str]:
        """The requests in short: "list", "page", or the start version of a watch."""
        short = []
        for request in self.server.requests:
            query = dict(pair.split("=") for pair in request.partition("?")[2].split("&") if pair)
            listing = "list" if LIST in query else "page"
            short.append(query.get("resourceVersion", listing))
        return short


@asynccontextmanager
async def running(informer: Informer[Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(informer.run())
    try:
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@asynccontextmanager
async def informing(
    *steps: Step,
    timings: Timings = Timings(short_lived=0.0),  # noqa: B008
    token: Token | None = None,
    plain_pages: int = 0,
    label_selector: str = "",
    namespace: str = "",
) -> AsyncIterator[Harness]:
    """An informer that streams its lists by default."""
    play, clock = Play(*steps), Clock()
    async with (
        serving(play) as server,
        connection(server.url, token).session("watch") as transport,
    ):
        play.server = server
        harness = Harness(server, clock)
        harness.informer = Informer(
            Watcher(
                PODS,
                lambda: 0.0,
                label_selector=label_selector,
                timings=timings,
                plain_pages=plain_pages,
            ),
            transport,
            Store(),
            harness.on_change,
            namespace=namespace,
            observer=harness.observed,
            clock=clock.time,
            sleep=clock.sleep,
        )
        async with running(harness.informer):
            yield harness


def added(name: str, version: int) -> bytes:
    return frame("ADDED", pod(name, version))
