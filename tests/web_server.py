"""Servers on 127.0.0.1 that leave no connection behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ssl import SSLContext

from aiohttp import web

_ACCEPT_TURNS = 4  # turns of the event loop from asyncio's accept to the handler's first step


async def stop_accepting(server: asyncio.Server) -> None:
    """Close the server once its handlers know each accepted connection.

    asyncio fails on those that it accepts while the server closes, and leaves them open.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(_ACCEPT_TURNS):
        await asyncio.sleep(0)
    server.close()


@asynccontextmanager
async def listening(runner: web.BaseRunner, tls: SSLContext | None = None) -> AsyncIterator[int]:
    """Serve on a free port, which it yields.

    Sites of aiohttp leave connections open: those that are being accepted, and those with data
    that the client does not read. The garbage collector reports them in a later test.
    """
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    server = await loop.create_server(runner.server, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await stop_accepting(server)
        transports = [connection.transport for connection in runner.server.connections]
        await runner.cleanup()
        for transport in transports:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        await asyncio.sleep(0)  # the turn in which they close
