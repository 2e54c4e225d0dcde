"""Ports of pods, towards any number of clients that have not authenticated."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from torchrun_runtime.launch import connections
from torchrun_runtime.launch.connections import Port, listen, most_connections


class Echo(asyncio.Protocol):
    """Admits a client that sends "key"."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data == b"key":
            self._port.admit(self._transport)
        self._transport.write(data)


class Server:
    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.clients: list[Client] = []

    async def connect(self, *, source: str = "127.0.0.1") -> "Client":
        """A client, once the server has accepted its connection."""
        streams = await asyncio.open_connection(*self.address, local_addr=(source, 0))
        self.clients.append(Client(*streams))
        return self.clients[-1]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def echo(self, data: bytes) -> bytes:
        """The reply; b"" if the server has ended the connection."""
        self.writer.write(data)
        return await self.read()

    async def read(self) -> bytes:
        try:
            return await self._reader.read(100)
        except ConnectionError:
            return b""


@asynccontextmanager
async def serving(
    most: int, seconds: float, *, speaks_first: bool = False
) -> AsyncIterator[Server]:
    port = Port(most, seconds, speaks_first=speaks_first)
    listener = listen("127.0.0.1", 0)
    server = Server(listener.getsockname())
    port.open(listener, lambda: Echo(port))
    try:
        yield server
    finally:
        port.close()
        for client in server.clients:
            client.writer.close()


@pytest.mark.parametrize("speaks_first", [False, True])
@pytest.mark.parametrize("sent", [b"", b"x"], ids=["silent", "without the key"])
async def test_one_connection_too_many_ends_the_oldest(sent: bytes, speaks_first: bool) -> None:
    async with serving(2, 600, speaks_first=speaks_first) as server:
        member = await server.connect()
        assert await member.echo(b"key") == b"key"
        strangers = [await server.connect() for _ in range(3)]
        if sent:
            for stranger in strangers[-2:]:
                assert await stranger.echo(sent) == sent
        assert await strangers[0].read() == b""
        assert await member.echo(b"again") == b"again"
        assert await strangers[2].echo(b"x") == b"x"


async def test_an_address_with_many_connections_does_not_end_those_of_others() -> None:
    async with serving(3, 600) as server:
        other = await server.connect(source="127.0.0.2")
        strangers = [await server.connect() for _ in range(8)]
        assert [await stranger.read() for stranger in strangers[:5]] == [b""] * 5
        assert await other.echo(b"x") == b"x"


@pytest.mark.parametrize("speaks_first", [False, True])
async def test_a_connection_that_does_not_authenticate_ends_after_a_time(
    speaks_first: bool,
) -> None:
    async with serving(10, 0.05, speaks_first=speaks_first) as server:
        silent, talking, member = [await server.connect() for _ in range(3)]
        assert await member.echo(b"key") == b"key"
        assert await talking.echo(b"x") == b"x"
        assert await silent.read() == b""
        assert await talking.read() == b""
        assert await member.echo(b"again") == b"again"


async def test_without_free_files_the_oldest_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listener that cannot accept more than four connections at a time."""
    async with serving(100, 600) as server:
        held = [await server.connect() for _ in range(4)]
        for client in held:
            assert await client.echo(b"x") == b"x"
        accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

        def fail_once(listener: socket.socket) -> object:
            if failures:
                raise failures.pop()
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", fail_once)
        assert await (await server.connect()).echo(b"x") == b"x"
        assert await held[0].read() == b""


class Limits:
    """The soft and the hard limit of open files, instead of those of this process."""

    RLIMIT_NOFILE, RLIM_INFINITY = 7, -1

    def __init__(self, soft: int, hard: int) -> None:
        self.values = soft, hard

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.values

    def setrlimit(self, _: int, values: tuple[int, int]) -> None:
        self.values = values


@pytest.mark.parametrize(
    ("soft", "hard", "then", "most"),
    [
        (1024, 4096, 2192, 1000),
        (1024, 1500, 1500, 308),
        (1024, 1024, 1024, 16),
        (1024, -1, 2192, 1000),
        (2192, 4096, 2192, 1000),
        (-1, -1, -1, 1000),
    ],
)
def test_authenticated_connections_have_open_files_whatever_others_do(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int, most: int
) -> None:
    monkeypatch.setattr(connections, "resource", limits := Limits(soft, hard))
    assert most_connections(1000, 1000) == most
    assert limits.values == (then, hard)
