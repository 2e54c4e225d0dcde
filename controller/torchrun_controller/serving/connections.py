"""Connections of an HTTP server: limits of their number and duration, and no log of bad requests.

Pods of any tenant may connect. A limit gives each address a fair share. aiohttp would log a
traceback for each request that is not HTTP.
"""

import asyncio  # protocols and transports: the interface of aiohttp's server
import logging
from collections import Counter
from typing import NamedTuple, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

CONNECTIONS = 500
CONNECTION_SECONDS = 20.0


def _is_our_error(record: logging.LogRecord) -> bool:
    """Whether a record is about an error of this program, and not about a request that is none."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


# The logger of the servers. Any pod could fill the log with requests that are not HTTP.
SERVER_LOG = logging.getLogger("aiohttp.server.limited")
SERVER_LOG.addFilter(_is_our_error)


class _Connection(NamedTuple):
    """The address of a client, its transport, and the time of the loop at which it ends."""

    source: str
    transport: asyncio.Transport
    until: float


class ConnectionLimit:
    """Accepts connections for a server and closes each after CONNECTION_SECONDS.

    At the limit, a new connection replaces the oldest one of the address with the most connections.
    A new connection of that address is refused, so no address can exclude the others.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._open: dict[RequestHandler, _Connection] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None  # one for all: a closed one needs none

    def new_protocol(self) -> asyncio.BaseProtocol:
        """Build the protocol of a new connection, for `create_server`."""
        return _NewConnection(self)

    def accept(self, transport: asyncio.Transport) -> None:
        """Pass the connection to the server, or abort it at the limit."""
        peer = transport.get_extra_info("peername")
        source = str(peer[0]) if peer else ""
        if not self._has_room_for(source):
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        protocol = self._server()
        self._open[protocol] = _Connection(source, transport, loop.time() + CONNECTION_SECONDS)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._timer is None:
            self._wait_for_the_oldest()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _has_room_for(self, source: str) -> bool:
        self._forget_closed()
        if len(self._server.connections) < CONNECTIONS:
            return True
        counts = Counter(connection.source for connection in self._open.values())
        busiest, count = next(iter(counts.most_common(1)), ("", 0))
        if count <= counts[source] + 1:
            return False
        self._end(next(c for c, one in self._open.items() if one.source == busiest))
        return True

    def _forget_closed(self) -> None:
        present = set(self._server.connections)
        self._open = {c: one for c, one in self._open.items() if c in present}

    def _wait_for_the_oldest(self) -> None:
        oldest = next(iter(self._open.values()), None)
        self._timer = None
        if oldest is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(oldest.until, self._end_old)

    def _end_old(self) -> None:
        self._forget_closed()
        now = asyncio.get_running_loop().time()
        for connection in [c for c, one in self._open.items() if one.until <= now]:
            self._end(connection)
        self._wait_for_the_oldest()

    def _end(self, connection: RequestHandler) -> None:
        """End a connection at once: closing would wait for a client that reads nothing."""
        connection.force_close()
        self._open.pop(connection).transport.abort()


class _NewConnection(asyncio.Protocol):
    """A connection before its address is known."""

    def __init__(self, limit: ConnectionLimit) -> None:
        self._limit = limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class is not a subclass of asyncio.Transport.
        self._limit.accept(cast("asyncio.Transport", transport))
