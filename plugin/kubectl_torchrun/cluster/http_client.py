"""Requests to one HTTP server, over TCP or a unix socket, without TLS.

Uses httpcore directly. httpx takes twice as long to import, and includes its own command line if
click and rich are installed.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from urllib.parse import quote, urlencode

import httpcore

TRANSPORT_ERRORS = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
)
TIMEOUTS = httpcore.TimeoutException
_TIMEOUT_SECONDS = 30.0
_KEEPALIVE_SECONDS = 5.0
_KEEPALIVE_CONNECTIONS = 20
_HEADERS = [("Accept", "*/*"), ("User-Agent", "kubectl-torchrun")]
_PATH_CHARACTERS = "/%:@!$&'()*+,;="  # that need no quotes; % for a path with quotes


class CompleteResponse(NamedTuple):
    """A response that was read to its end."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8."""
        return self.content.decode(errors="replace")


class StreamedResponse:
    """A response whose content is read in chunks, or all at once."""

    def __init__(self, response: httpcore.Response) -> None:
        self.status = response.status
        self._response = response

    def chunks(self) -> AsyncIterator[bytes]:
        """The content as it arrives. Raises TRANSPORT_ERRORS."""
        return self._response.aiter_stream()

    async def read(self) -> CompleteResponse:
        """The rest of the content. Raises TRANSPORT_ERRORS."""
        return CompleteResponse(self.status, await self._response.aread())


class HttpClient:
    """A pool of connections to one server. Use as an async context manager.

    url: scheme, host and port of the server. socket: a unix socket to connect to instead.
    Requests raise TRANSPORT_ERRORS.
    """

    def __init__(self, url: str = "http://localhost", socket: Path | None = None) -> None:
        self._url = httpcore.URL(url)
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None,
            max_keepalive_connections=_KEEPALIVE_CONNECTIONS,
            keepalive_expiry=_KEEPALIVE_SECONDS,
            uds=None if socket is None else str(socket),
        )

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._pool.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        seconds: float = _TIMEOUT_SECONDS,
        most: int | None = None,
    ) -> CompleteResponse:
        """Send a request, and read the response.

        seconds: of silence, for each step of it. most: bytes of the content; the rest is not read.
        """
        body = bytearray()
        async with self._pool.stream(
            method,
            self._target(path, query),
            headers=[*_HEADERS, *(headers or {}).items()],
            content=content,
            extensions={"timeout": _timeouts(seconds)},
        ) as response:
            async for chunk in response.aiter_stream():
                body += chunk
                if most is not None and len(body) > most:
                    break
        return CompleteResponse(response.status, bytes(body[:most]))

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float | None
    ) -> AsyncIterator[StreamedResponse]:
        """Send a GET request. silence: seconds between two chunks; None for no limit."""
        async with self._pool.stream(
            "GET",
            self._target(path, query),
            headers=[*_HEADERS],
            extensions={"timeout": {**_timeouts(_TIMEOUT_SECONDS), "read": silence}},
        ) as response:
            yield StreamedResponse(response)

    def _target(self, path: str, query: Mapping[str, str] | None) -> httpcore.URL:
        target = quote(path, safe=_PATH_CHARACTERS)
        if query:
            target += "?" + urlencode(query)
        url = self._url
        return httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=target.encode())


def _timeouts(seconds: float) -> dict[str, float | None]:
    return dict.fromkeys(("connect", "read", "write", "pool"), seconds)
