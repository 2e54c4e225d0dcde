"""A real HTTP server on 127.0.0.1 that plays an API server with injected faults."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ssl import SSLContext

from aiohttp import web

from torchrun_api.json import JsonObject
from torchrun_controller.client.connection import Connection
from torchrun_controller.client.credentials import Endpoint, Tls
from web_server import listening, stop_accepting

# The head of a response that is sent byte by byte.
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedServer:
    """A running server: its URL and its requests, as "METHOD path?query"."""

    url: str
    requests: list[str] = field(default_factory=list)
    hung: asyncio.Event = field(default_factory=asyncio.Event)

    async def hang(self) -> None:
        """Keep a request open until the server stops."""
        await self.hung.wait()


@asynccontextmanager
async def serving(handler: Handler, tls: SSLContext | None = None) -> AsyncIterator[ScriptedServer]:
    """Answer every request with `handler`."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        server.requests.append(f"{request.method} {request.rel_url}")
        return await handler(request)

    runner = web.ServerRunner(web.Server(answer), handle_signals=False, shutdown_timeout=0.1)
    async with listening(runner, tls) as port:
        server = ScriptedServer(f"{'https' if tls else 'http'}://127.0.0.1:{port}")
        try:
            yield server
        finally:
            server.hung.set()


@asynccontextmanager
async def serving_bytes(reply: bytes) -> AsyncIterator[str]:
    """Answer every connection with exactly these bytes, and close it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            await stop_accepting(server)


def json_response(
    body: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.json_response(body, status=status, headers=headers)


async def streamed(request: web.BaseRequest, *chunks: bytes) -> web.StreamResponse:
    """Start a watch and send chunks. The stream ends when the handler returns."""
    response = web.StreamResponse()
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response


class Token:
    """Credentials whose value a test sets; counts how often it was read and renewed."""

    tls: Tls | None = None

    def __init__(self, value: str = "Bearer one", renewed: str = "Bearer one") -> None:
        self.value = value
        self.renewed = renewed
        self.reads = 0
        self.renewals = 0

    async def read(self) -> str:
        self.reads += 1
        return self.value

    async def renew(self) -> str:
        self.renewals += 1
        self.value = self.renewed
        return self.value


def connection(url: str, token: Token | None = None) -> Connection:
    """Connect without a kubeconfig."""
    return Connection(Endpoint(server=url), token or Token())
