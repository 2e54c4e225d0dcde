"""Watches as a session opens them, against a real HTTP server."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from scripted_server import (
    OK,
    connection,
    json_response,
    serving,
    serving_bytes,
    streamed,
)
from torchrun_controller.client import ApiError, Disconnected, Silent


class TestStream:
    async def test_bytes_arrive_without_delay_until_the_end(self) -> None:
        async def watch(request: web.BaseRequest) -> web.StreamResponse:
            return await streamed(request, b"one\n", b"two\n")

        async with (
            serving(watch) as server,
            connection(server.url).session("watch") as transport,
            transport.stream("/api/v1/pods", query={"watch": "true"}, total=10) as chunks,
        ):
            assert b"".join([chunk async for chunk in chunks]) == b"one\ntwo\n"
        assert server.requests == ["GET /api/v1/pods?watch=true"]

    async def test_a_redirect_is_refused(self) -> None:
        """The library follows it: the page of a login is no watch."""

        async def login(request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/login":
                return await streamed(request, b"who are you?\n")
            raise web.HTTPFound("/login")

        async with serving(login) as server, connection(server.url).session("watch") as transport:
            with pytest.raises(ApiError, match="302 Found"):
                async with transport.stream("/api/v1/pods", query={}, total=10):
                    pass
            with pytest.raises(ApiError, match="302 Found"):
                await transport.read_list("/api/v1/pods")

    async def test_dead_silent_watch(self) -> None:
        async def watch(request: web.BaseRequest) -> web.StreamResponse:
            response = await streamed(request, b"one\n")
            await server.hang()
            return response

        async with (
            serving(watch) as server,
            connection(server.url).session("watch") as transport,
            transport.stream("/api/v1/pods", query={}, silence=60, total=120) as chunks,
        ):
            assert await anext(chunks) == b"one\n"
            protocol = chunks._content._protocol
            assert protocol.read_timeout == 60
            protocol.read_timeout = 0.05  # from the start, it would also limit the opening
            protocol.start_timeout()
            with pytest.raises(Silent, match="Timeout on reading"):
                await anext(chunks)

    async def test_total_time_is_bounded(self) -> None:
        async def watch(request: web.BaseRequest) -> web.StreamResponse:
            response = await streamed(request, b"one\n")
            while not server.hung.is_set():
                await response.write(b"more\n")
                await asyncio.sleep(0.005)
            return response

        async def read_all() -> None:
            async with transport.stream("/x", query={}, silence=5, total=0.1) as chunks:
                async for _ in chunks:
                    pass

        async with serving(watch) as server, connection(server.url).session("watch") as transport:
            with pytest.raises(Disconnected, match="timed out"):
                await read_all()

    @pytest.mark.parametrize(
        "rest", [b"", b"4\r\non", b"zz\r\n"], ids=["no end", "short chunk", "not a chunk"]
    )
    async def test_a_broken_stream(self, rest: bytes) -> None:
        async def read_all() -> None:
            async with transport.stream("/x", query={}, total=10) as chunks:
                async for _ in chunks:
                    pass

        reply = OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n" + rest
        async with serving_bytes(reply) as url, connection(url).session("watch") as transport:
            with pytest.raises(Disconnected, match="GET /x: "):
                await read_all()

    async def test_refused(self) -> None:
        async def refuse(request: web.BaseRequest) -> web.Response:
            return json_response({"kind": "Status", "reason": "Expired", "message": "old"}, 410)

        async def open_it() -> None:
            async with transport.stream("/x", query={}, total=10):
                pass

        async with serving(refuse) as server, connection(server.url).session("watch") as transport:
            with pytest.raises(ApiError, match="410 Expired: old"):
                await open_it()

    async def test_many_streams_at_once(self) -> None:
        async def watch(request: web.BaseRequest) -> web.StreamResponse:
            response = await streamed(request, b"one\n")
            await server.hang()
            return response

        async with (
            serving(watch) as server,
            connection(server.url).session("watch") as transport,
            contextlib.AsyncExitStack() as stack,
        ):
            for _ in range(120):
                await stack.enter_async_context(transport.stream("/x", query={}, total=10))

    async def test_leaving_early_closes_the_socket(self) -> None:
        gone = asyncio.Event()

        async def watch(request: web.BaseRequest) -> web.StreamResponse:
            response = await streamed(request, b"one\n")
            try:
                while True:
                    await response.write(b"more\n")
                    await asyncio.sleep(0.001)
            except ConnectionError:
                gone.set()
                raise

        async with serving(watch) as server, connection(server.url).session("watch") as transport:
            async with transport.stream("/x", query={}, total=10) as chunks:
                assert await anext(chunks)
            async with asyncio.timeout(60):
                await gone.wait()
