"""Who may connect: so many at a time, each for so long, and nobody at the expense of others."""

import asyncio
from collections import Counter
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

CONNECTIONS = 500
CONNECTION_SECONDS = 20.0


class Door:
    """Lets connections in to a server. Each ends by itself after a while.

    Where there are too many, the address that has most of them loses its oldest, so that nobody who
    opens many keeps others out. A newcomer that has as many itself is turned away.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._inside: dict[RequestHandler, str] = {}  # the oldest first

    def open(self) -> asyncio.BaseProtocol:
        """Make the protocol of a new connection, for `create_server`."""
        return _Arrival(self)

    def enter(self, transport: asyncio.Transport) -> None:
        """Let a connection in, or end it."""
        peer = transport.get_extra_info("peername")
        source = str(peer[0]) if peer else ""
        if not self._has_room_for(source):
            transport.abort()
            return
        protocol = self._server()
        self._inside[protocol] = source
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        asyncio.get_running_loop().call_later(CONNECTION_SECONDS, protocol.force_close)

    def _has_room_for(self, source: str) -> bool:
        here = set(self._server.connections)
        self._inside = {each: of for each, of in self._inside.items() if each in here}
        if len(here) < CONNECTIONS:
            return True
        counts = Counter(self._inside.values())
        greediest, count = counts.most_common(1)[0]
        if count <= counts[source] + 1:
            return False
        next(each for each, of in self._inside.items() if of == greediest).force_close()
        return True


class _Arrival(asyncio.Protocol):
    """A connection of which nothing is known yet."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one in all but its base class.
        self._door.enter(cast("asyncio.Transport", transport))
