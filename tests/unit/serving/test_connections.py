"""Connections to each port are bounded in number and time, and bad requests do not fill the log."""

import asyncio
import gc
import logging
import socket
from contextlib import suppress

import aiohttp
import anyio
import pytest
from aiohttp.web_protocol import RequestHandler

from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving import connections, server
from torchrun_controller.serving.server import HttpServer
from unit.serving.progress.reporting import World, running

HUGE = 1000.0


async def test_connections_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 2)
    monkeypatch.setattr(connections, "CONNECTION_SECONDS", HUGE)
    async with running(World()) as world:
        held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(aiohttp.ClientError):
            await world.post()
        for _, writer in held:
            writer.close()


async def test_connections_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 2)
    monkeypatch.setattr(connections, "CONNECTION_SECONDS", 0.3)
    async with running(World()) as world:
        held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2)]
        for reader, writer in held:
            assert await reader.read() == b"", "closed by the server"
            writer.close()
        monkeypatch.setattr(connections, "CONNECTION_SECONDS", HUGE)
        assert (await world.post())[0] == 204


async def test_many_connections_of_one_client_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 4)
    async with running(World()) as world:
        held = [
            await asyncio.open_connection("127.0.0.1", world.port, local_addr=("127.0.0.2", 0))
            for _ in range(6)
        ]
        assert (await world.post())[0] == 204
        ended = [reader.at_eof() for reader, _ in held]
        for _, writer in held:
            writer.close()
        assert sum(ended) >= 3, "its oldest connection was closed, and the excess was refused"


async def test_clients_that_read_nothing_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 2)
    monkeypatch.setattr(connections, "CONNECTION_SECONDS", 0.3)
    original = server.listen

    def listen(address: str, port: int) -> socket.socket:
        """A socket whose buffers are smaller than the page."""
        listener = original(address, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(server, "listen", listen)
    metrics = Metrics()
    for number in range(50):
        metrics.add_queue(("team", f"queue-{number}"))
    page, _ = metrics.snapshot().render("")
    assert len(page) > 50_000
    loop = asyncio.get_running_loop()
    pages = HttpServer("127.0.0.1", 0, metrics=metrics, live={}, ready={})
    async with pages.running():
        clients = [socket.socket() for _ in range(2)]
        for client in clients:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            await loop.sock_connect(client, ("127.0.0.1", pages.port))
            await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        with anyio.fail_after(60):
            while not answer:  # until the others are ended
                reader, writer = await asyncio.open_connection("127.0.0.1", pages.port)
                writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
                with suppress(ConnectionError):
                    answer = await reader.read()
                writer.close()
        assert b" 200 " in answer
        for client in clients:
            client.close()


async def test_a_closed_connection_leaves_nothing() -> None:
    async with running(World()) as world:
        before = handlers()
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 404")
            writer.close()
        assert handlers() < before + 20


def handlers() -> int:
    """The number of handlers of connections in memory."""
    gc.collect()
    return sum(isinstance(each, RequestHandler) for each in gc.get_objects())


async def test_the_pages_have_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTION_SECONDS", 0.3)
    pages = HttpServer("127.0.0.1", 0, metrics=Metrics(), live={}, ready={})
    async with pages.running():
        reader, writer = await asyncio.open_connection("127.0.0.1", pages.port)
        assert await reader.read() == b"", "closed by the server"
        writer.close()
        monkeypatch.setattr(connections, "CONNECTION_SECONDS", HUGE)
        reader, writer = await asyncio.open_connection("127.0.0.1", pages.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"\r\nConnection: close\r\n" in answer
        writer.close()


async def test_requests_that_are_not_http_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    pages = HttpServer("127.0.0.1", 0, metrics=Metrics(), live={}, ready={"a": _fails})
    async with running(World()) as world, pages.running():
        for port in (world.port, pages.port):
            for garbage in (b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nX y\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(garbage)
                assert b" 400 " in await reader.read()
                writer.close()
        assert caplog.records == []
        with caplog.at_level(logging.ERROR):
            reader, writer = await asyncio.open_connection("127.0.0.1", pages.port)
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 500 " in await reader.readline()
            writer.close()
        assert "Error handling request" in caplog.text, "but our own errors are"


def _fails() -> str:
    raise RuntimeError("a bug")


def test_uvloop_serves_and_ends_connections_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop, the loop of the controller, has other transport classes."""
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(connections, "CONNECTIONS", 2)

    async def play() -> None:
        async with running(World()) as world:
            assert (await world.post())[0] == 204
            held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(3)]
            assert await held[2][0].read() == b"", "refused"
            for _, writer in held:
                writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(play(), 120))
