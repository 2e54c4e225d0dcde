"""A port that any pod of the cluster can reach: limits of connections that have not authenticated.

Such a connection ends after a time, and at once if a new one needs its place. So clients that only
open connections neither use up the open files of the process nor block others.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from contextlib import suppress
from typing import Callable, NamedTuple, Union

_BACKLOG = 4096
_BATCH = 64  # connections that are accepted before others are served
_PAUSE_SECONDS = 1.0  # if all open files are in use, and no connection can be ended
# Open files of connections that have not closed yet, and of all else of the process.
_OTHER_FILES = 2 * _BATCH + 64
_FEWEST = 16

Connection = Union[socket.socket, asyncio.Transport]


class _Limit(NamedTuple):
    """The limit of a connection. address: of the client."""

    address: str
    timer: asyncio.TimerHandle


class Port:
    """Accepts connections, each with a new protocol, and limits those without authentication.

    most: their number. One more ends the oldest of the address with the most of them. seconds: how
    long one of them may last. speaks_first: the server sends before the client; otherwise a
    connection costs no protocol before its first byte.

    Use it only in the thread of one event loop.
    """

    def __init__(self, most: int, seconds: float, *, speaks_first: bool = False) -> None:
        self._most = most
        self._seconds = seconds
        self._speaks_first = speaks_first
        self._limits: dict[Connection, _Limit] = {}  # the oldest first
        self._counts: Counter[str] = Counter()  # of them, by address
        self._starting: set[asyncio.Task[None]] = set()

    def open(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections until `close`, in the running event loop."""
        self._loop = asyncio.get_event_loop()
        self._listener = listener
        self._protocol = protocol
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more connections. Those that have sent something stay open."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in [c for c in self._limits if isinstance(c, socket.socket)]:
            self._end(connection)

    def limit(self, transport: asyncio.BaseTransport | None) -> None:
        """Limit a connection: a new one, or one whose authenticated request has ended.

        One that is limited already keeps its time.
        """
        if isinstance(transport, asyncio.Transport) and not transport.is_closing():
            peer = transport.get_extra_info("peername")
            self._limit(transport, str(peer[0]) if peer else "")

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Remove the limits of a connection, which has authenticated or ended."""
        if isinstance(transport, asyncio.Transport):
            self._forget(transport)

    def _limit(self, connection: Connection, address: str) -> None:
        if connection in self._limits:
            return
        if len(self._limits) >= self._most:
            self._end_oldest()
        timer = self._loop.call_later(self._seconds, self._end, connection)
        self._limits[connection] = _Limit(address, timer)
        self._counts[address] += 1

    def _forget(self, connection: Connection) -> None:
        limit = self._limits.pop(connection, None)
        if limit is None:
            return
        limit.timer.cancel()
        self._counts[limit.address] -= 1
        if not self._counts[limit.address]:
            del self._counts[limit.address]

    def _end(self, connection: Connection) -> None:
        self._forget(connection)
        if isinstance(connection, socket.socket):
            self._loop.remove_reader(connection)
            connection.close()
        elif connection.get_write_buffer_size():
            connection.abort()  # `close` would wait for a client that reads nothing
        else:
            connection.close()

    def _end_oldest(self) -> None:
        """End the oldest connection of the address with the most."""
        busiest = max(self._counts, key=self._counts.__getitem__)
        self._end(next(c for c, limit in self._limits.items() if limit.address == busiest))

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                self._free_a_file()
                return
            connection.setblocking(False)
            if self._speaks_first:
                self._start(connection)
            elif not self._read_first(connection):
                self._limit(connection, str(peer[0]))
                self._loop.add_reader(connection, self._read_first, connection)

    def _free_a_file(self) -> None:
        """All open files are in use: end a connection, or accept none for a while."""
        if self._limits:
            self._end_oldest()
            return
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _read_first(self, connection: socket.socket) -> bool:
        """Look for the first byte of a connection; False if the client has sent nothing yet."""
        try:
            has_sent = connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            has_sent = b""
        if not has_sent:
            self._end(connection)
            return True
        self._forget(connection)
        self._loop.remove_reader(connection)
        self._start(connection)
        return True

    def _start(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._connect(connection))
        self._starting.add(task)  # the loop has only a weak reference
        task.add_done_callback(self._starting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        with suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: _Limited(self._protocol(), self), connection
            )


class _Limited(asyncio.Protocol):
    """Forwards everything to another protocol, and limits its connection."""

    def __init__(self, inner: asyncio.Protocol, port: Port) -> None:
        self._inner = inner
        self._port = port
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._port.limit(transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.admit(self._transport)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def listen(host: str, port: int) -> socket.socket:
    """A listener on this address; host "": on every address. Raises OSError."""
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is supported but disabled
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


def most_connections(wanted: int, others: int) -> int:
    """How many connections may be unauthenticated: as many as wanted, if there are enough files.

    others: connections that authenticate. Raises the soft limit of open files as far as needed.
    """
    needed = wanted + others + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return max(wanted - (needed - soft), _FEWEST)
