"""HTTP clients of the API server, shared by the load and the bare clients.

`Client` sends short requests over the transport of the controller. Watches use aiohttp, like those
of the controller.
"""

import asyncio
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from torchrun_api.json import JsonObject
from torchrun_controller.client.credentials import Endpoint, Tls
from torchrun_controller.client.http1 import encode_request
from torchrun_controller.client.pool import Pool

JSON = "application/json"
APPLY = "application/apply-patch+yaml"


class RefusedError(RuntimeError):
    """The server has refused a request with this status; the text has its message."""

    def __init__(self, request: str, status: int, body: bytes) -> None:
        super().__init__(f"{request}: {status} {body.decode()[:500]}")
        self.status = status


class Server(msgspec.Struct, frozen=True):
    """The address and the client certificate of the API server."""

    url: str
    ca_file: str
    certificate: str
    key: str

    def tls(self) -> ssl.SSLContext:
        """The CA and the client certificate."""
        context = ssl.create_default_context(cafile=self.ca_file)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_cert_chain(self.certificate, self.key)
        return context

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A session without limits on connections."""
        connector = aiohttp.TCPConnector(ssl=self.tls(), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            self.url, connector=connector, timeout=timeout
        ) as new_session:
            yield new_session


class Client:
    """Short requests over the transport of the controller: httptools and its pool."""

    def __init__(self, server: Server) -> None:
        self._endpoint = Endpoint(server.url, Tls(server.tls()))
        self._headers = {"Host": urllib.parse.urlsplit(server.url).netloc, "Accept": JSON}
        self._pool = Pool()

    async def send(
        self, method: str, target: str, body: bytes = b"", content_type: str = JSON
    ) -> bytes:
        """Send one request. Raises RefusedError."""
        headers = self._headers | {"Content-Type": content_type}
        request = encode_request(method, target, headers, body or None)
        response = await self._pool.exchange(self._endpoint, request, 60.0)
        if response.status >= 300:
            raise RefusedError(f"{method} {target}", response.status, response.body)
        return response.body

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()


async def send(
    session: aiohttp.ClientSession, method: str, path: str, body: bytes, content_type: str
) -> bytes:
    """Send one request. Raises RefusedError."""
    headers = {"Content-Type": content_type}
    async with session.request(method, path, data=body, headers=headers) as answer:
        text = await answer.read()
        if answer.status >= 300:
            raise RefusedError(f"{method} {path}", answer.status, text)
        return text


def _nothing() -> None:
    pass


async def watch(
    session: aiohttp.ClientSession, path: str, on_start: Callable[[], None] = _nothing
) -> AsyncIterator[JsonObject]:
    """Objects that are added under `path` after `on_start`, for up to an hour."""
    async for kind, body in events(session, path, on_start):
        if kind == "ADDED":
            yield body


async def events(
    session: aiohttp.ClientSession, path: str, on_start: Callable[[], None] = _nothing
) -> AsyncIterator[tuple[str, JsonObject]]:
    """Type and object of every change under `path` after `on_start`, for up to an hour."""
    async with asyncio.timeout(30):
        listed = await _list(session, path)
    metadata = listed["metadata"]
    assert isinstance(metadata, dict)
    version = str(metadata["resourceVersion"])
    on_start()
    # A server ends watches of newly installed kinds.
    while True:
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "3600"}
        async with session.get(path, params=query) as answer:
            if answer.status != 200:
                await asyncio.sleep(0.1)
                continue
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"the watch of {path}: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event["type"], event["object"]
        await asyncio.sleep(0.01)


async def _list(session: aiohttp.ClientSession, path: str) -> JsonObject:
    """The collection, once the API server serves it; a new kind takes some time."""
    while True:
        async with session.get(path) as answer:
            if answer.status == 200:
                return msgspec.json.decode(await answer.read(), type=JsonObject)


def read(path: Path) -> Server:
    """Read the server from a file that the bench wrote for its processes."""
    return msgspec.json.decode(path.read_bytes(), type=Server)
