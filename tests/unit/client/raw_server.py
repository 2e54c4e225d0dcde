"""Servers and a proxy that send given bytes, and count connections and requests."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torchrun_controller.client.credentials import Endpoint
from torchrun_controller.client.http1 import encode_request
from web_server import stop_accepting

REQUEST = encode_request("GET", "/x", {"Host": "a"}, None)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Server:
    """Answers the n-th request on a connection with the n-th reply; after the last one it closes."""

    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    arrivals: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self.port}")


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def listening(handle: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Call `handle` for each connection to the port, and end all of them at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        # A cancelled handler has no reader: asyncio would log the error.
        with suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            await handle(reader, writer)
        writer.close()
        if not listener.is_serving():
            writer.transport.abort()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        await stop_accepting(listener)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # an aborted transport is closed one turn of the loop later


@asynccontextmanager
async def serving(
    *replies: bytes, tls: ssl.SSLContext | None = None, linger: bool = True
) -> AsyncIterator[Server]:
    """Serve; with `linger` a connection stays open after its last reply."""
    server = Server()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            for reply in replies:
                server.requests.append(await reader.readuntil(b"\r\n\r\n"))
                server.arrivals.put_nowait(None)
                writer.write(reply)
            if linger:
                await reader.read()
        finally:
            server.ended.put_nowait(None)

    async with listening(answer, tls) as server.port:
        yield server


@asynccontextmanager
async def proxying(answer: bytes = b"HTTP/1.1 200 Connected\r\n\r\n") -> AsyncIterator[Server]:
    """A proxy that knows CONNECT only; `answer` is its reply."""
    proxy = Server()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
        writer.close()

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        proxy.requests.append(request)
        host, _, port = request.split(b" ")[1].rpartition(b":")
        writer.write(answer)
        if b" 200 " in answer:
            inner, outer = await asyncio.open_connection(host.decode(), int(port))
            try:
                await asyncio.gather(pass_on(reader, outer), pass_on(inner, writer))
            finally:
                outer.transport.abort()

    async with listening(tunnel) as proxy.port:
        yield proxy
