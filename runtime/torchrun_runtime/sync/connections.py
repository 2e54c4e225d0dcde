"""Limits of the connections of a server of sync and serve pods: their number and their idle time.

Any pod of the cluster can connect. An idle connection is closed after a timeout, and at once if a
new one needs its place. So clients that only keep connections open do not block others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

Factory = Callable[[], asyncio.Protocol]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """At most `most` connections; one without a request ends after `silence` seconds.

    Use it only in the thread of one event loop.
    """

    def __init__(self, most: int, silence: float) -> None:
        self._most = most
        self._silence = silence
        # Connections without a request, the longest idle first, each with its timer.
        self._idle: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._busy: set[asyncio.Transport] = set()

    def protocol(self, factory: Factory) -> asyncio.Protocol:
        """Create a protocol with the factory, and count its connection."""
        return _Counted(factory(), self)

    @web.middleware
    async def track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A middleware: a connection is not idle while its request is handled."""
        with self._serving(request.transport):
            return await handler(request)

    @contextmanager
    def _serving(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        if not isinstance(transport, asyncio.Transport) or transport not in self._idle:
            yield
            return
        self._idle.pop(transport).cancel()
        self._busy.add(transport)
        try:
            yield
        finally:
            if transport in self._busy:
                self._busy.remove(transport)
                self._wait(transport)

    def add(self, transport: asyncio.Transport) -> None:
        """Add a connection. If there are too many, close the one with the longest idle time."""
        if len(self._idle) + len(self._busy) >= self._most:
            self._end(next(iter(self._idle), transport))
        if not transport.is_closing():
            self._wait(transport)

    def closed(self, transport: asyncio.Transport) -> None:
        """Remove a connection."""
        self._busy.discard(transport)
        timer = self._idle.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _wait(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._idle[transport] = loop.call_later(self._silence, self._end, transport)

    def _end(self, transport: asyncio.Transport) -> None:
        self.closed(transport)
        transport.close()


class _Counted(asyncio.Protocol):
    """Forwards everything to another protocol, and counts its connection."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._connections.closed(self._transport)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
