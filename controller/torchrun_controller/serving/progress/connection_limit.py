"""A limit on the number and the duration of connections, with a fair share for each address."""

import asyncio  # protocols and transports: the interface of aiohttp's server
from collections import Counter
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

CONNECTIONS = 500
CONNECTION_SECONDS = 20.0


class ConnectionLimit:
    """Accepts connections for a server and closes each after CONNECTION_SECONDS.

    At the limit, a new connection replaces the oldest one of the address with the most connections.
    A new connection of that address is refused, so no address can exclude the others.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._open: dict[RequestHandler, str] = {}  # address by connection, the oldest first

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
        protocol = self._server()
        self._open[protocol] = source
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        asyncio.get_running_loop().call_later(CONNECTION_SECONDS, protocol.force_close)

    def _has_room_for(self, source: str) -> bool:
        present = set(self._server.connections)
        self._open = {
            connection: address
            for connection, address in self._open.items()
            if connection in present
        }
        if len(present) < CONNECTIONS:
            return True
        counts = Counter(self._open.values())
        busiest, count = counts.most_common(1)[0]
        if count <= counts[source] + 1:
            return False
        next(c for c, address in self._open.items() if address == busiest).force_close()
        return True


class _NewConnection(asyncio.Protocol):
    """A connection before its address is known."""

    def __init__(self, limit: ConnectionLimit) -> None:
        self._limit = limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class is not a subclass of asyncio.Transport.
        self._limit.accept(cast("asyncio.Transport", transport))
