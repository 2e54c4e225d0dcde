"""Connections to the endpoint are bounded in number and time."""

import asyncio

import aiohttp
import pytest

from torchrun_controller.serving.progress import connection_limit
from unit.serving.progress.reporting import World, running

HUGE = 1000.0


async def test_connections_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "CONNECTIONS", 2)
    monkeypatch.setattr(connection_limit, "CONNECTION_SECONDS", HUGE)
    async with running(World()) as world:
        held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(aiohttp.ClientError):
            await world.post()
        for _, writer in held:
            writer.close()


async def test_connections_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "CONNECTIONS", 2)
    monkeypatch.setattr(connection_limit, "CONNECTION_SECONDS", 0.3)
    async with running(World()) as world:
        held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2)]
        for reader, writer in held:
            assert await reader.read() == b"", "closed by the server"
            writer.close()
        monkeypatch.setattr(connection_limit, "CONNECTION_SECONDS", HUGE)
        assert (await world.post())[0] == 204


async def test_many_connections_of_one_client_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_limit, "CONNECTIONS", 4)
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


def test_uvloop_serves_and_ends_connections_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop, the loop of the controller, has other transport classes."""
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(connection_limit, "CONNECTIONS", 2)

    async def play() -> None:
        async with running(World()) as world:
            assert (await world.post())[0] == 204
            held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(3)]
            assert await held[2][0].read() == b"", "refused"
            for _, writer in held:
                writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(play(), 120))
