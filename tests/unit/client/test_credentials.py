"""A slow credential plugin, and which requests wait for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from scripted_server import Token
from torchrun_controller.client import Connection
from torchrun_controller.client import connection as transport_connection
from torchrun_controller.client.credentials import Endpoint


class Slow(Token):
    """Credentials of a plugin that is slow after the first read."""

    def __init__(self) -> None:
        super().__init__(renewed="Bearer renewed")
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def read(self) -> str:
        await self.goes_on.wait()
        return await super().read()

    async def renew(self) -> str:
        await self.goes_on.wait()
        return await super().renew()


@asynccontextmanager
async def aged() -> AsyncIterator[tuple[Connection, Slow]]:
    """A connection with stale credentials whose renewal never ends."""
    now = [0.0]
    plugin = Slow()
    connection = Connection(Endpoint("http://x"), plugin, clock=lambda: now[0])
    assert await connection.authorization() == "Bearer one"
    plugin.goes_on.clear()
    plugin.value = "Bearer two"
    now[0] += 60
    async with asyncio.timeout(60), connection.refreshing():
        yield connection, plugin


class TestSlowPlugin:
    """A renewal of one minute does not delay requests with credentials that may be valid."""

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport_connection, "REREAD_TIMEOUT", 0.01)

    async def test_requests_use_the_old_value_meanwhile(self) -> None:
        async with aged() as (connection, plugin):
            for _ in range(3):
                assert await connection.authorization() == "Bearer one"
            plugin.goes_on.set()
            while await connection.authorization() != "Bearer two":  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert plugin.reads == 2, "one renewal"

    async def test_a_cancelled_request_does_not_cancel_the_renewal(self) -> None:
        async with aged() as (connection, plugin):
            request = asyncio.create_task(connection.authorization())
            await asyncio.sleep(0)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            plugin.goes_on.set()
            while await connection.authorization() != "Bearer two":  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert plugin.reads == 2

    async def test_refused_requests_wait_for_one_renewal(self) -> None:
        async with aged() as (connection, plugin):
            refused = [
                asyncio.create_task(connection.authorization(refused="Bearer one"))
                for _ in range(3)
            ]
            await asyncio.sleep(0)
            assert await connection.authorization() == "Bearer one"
            plugin.goes_on.set()
            assert await asyncio.gather(*refused) == ["Bearer renewed"] * 3
            assert plugin.renewals == 1

    async def test_a_value_that_was_read_meanwhile_needs_no_renewal(self) -> None:
        async with aged() as (connection, plugin):
            assert await connection.authorization() == "Bearer one"
            refused = asyncio.create_task(connection.authorization(refused="Bearer one"))
            await asyncio.sleep(0)
            plugin.goes_on.set()
            assert await refused == "Bearer two"
            assert plugin.renewals == 0

    async def test_a_bug_of_the_plugin_keeps_the_old_value(self) -> None:
        class Broken(Token):
            async def renew(self) -> str:
                raise ZeroDivisionError

        connection = Connection(Endpoint("http://x"), Broken())
        value = await connection.authorization()
        with structlog.testing.capture_logs() as lines:
            assert await connection.authorization(refused=value) == value
        assert lines[0]["exc_info"]
