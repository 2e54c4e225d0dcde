"""Short requests and streams over one pool of sockets."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeAlias, TypeVar

import aiohttp
import yarl
from msgspec import Struct

from torchrun_controller.client.credentials import Endpoint
from torchrun_controller.client.errors import ApiError, Disconnected, InvalidResponse, Silent

# Called with the verb ("get", "patch", "watch"), the resource ("jobs.batch"), the HTTP code (0: no
# response) and the seconds until the response's headers.
Observe: TypeAlias = Callable[[str, str, int, float], None]

T = TypeVar("T")

CONNECT_SECONDS = 10.0
_NO_QUERY: Mapping[str, str] = {}
_NO_HEADERS: Mapping[str, str] = {}


class Authority(Protocol):
    """What a session needs from its connection."""

    @property
    def endpoint(self) -> Endpoint:
        """The server."""

    async def authorization(self, refused: str | None = None) -> str:
        """Return the Authorization header, renewed if its value is `refused`."""


class Response(Struct, frozen=True):
    """A complete response with a status below 300; `request` names it in error messages."""

    status: int
    body: bytes
    etag: str = ""
    request: str = "the API server"

    def read(self, parse: Callable[[bytes], T]) -> T:
        """Parse the body. Raises InvalidResponse if `parse` raises ValueError or RecursionError.

        msgspec raises nothing else, also for invalid UTF-8 and deep nesting.
        """
        try:
            return parse(self.body)
        except (ValueError, RecursionError) as error:
            raise InvalidResponse.of(self.request, self.body, error) from error


class Requests(Protocol):
    """Short requests, as `Transport` sends them."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = ...,
        body: bytes | None = None,
        content_type: str = ...,
        headers: Mapping[str, str] = ...,
        timeout: float = ...,  # noqa: ASYNC109 as in Transport.request
    ) -> Response:
        """Send one request and read the complete response. Raises ApiError and Disconnected."""


class _Request(Struct, frozen=True):
    verb: str
    method: str
    path: str
    query: Mapping[str, str]
    limits: aiohttp.ClientTimeout
    body: bytes | None = None
    content_type: str = ""
    headers: Mapping[str, str] = _NO_HEADERS


class Transport:
    """Sends requests and opens streams. Every failure is an ApiError or Disconnected."""

    def __init__(
        self, authority: Authority, session: aiohttp.ClientSession, observe: Observe
    ) -> None:
        self._authority = authority
        self._session = session
        self._observe = observe
        self._server = yarl.URL(authority.endpoint.server)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = _NO_QUERY,
        body: bytes | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] = _NO_HEADERS,
        timeout: float = 30.0,  # noqa: ASYNC109 aiohttp's own also bounds each step
    ) -> Response:
        """Send one request and read the complete response within `timeout` seconds.

        Raises ApiError for a status of 300 and above, and Disconnected without a complete response.
        A request refused with 401 is sent once more if the credentials could be renewed.
        """
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        call = _Request(method.lower(), method, path, query, limits, body, content_type, headers)
        async with self._open(call) as response:
            with _translate_errors(call):
                etag = response.headers.get("ETag", "")
                request = f"{call.method} {call.path}"
                return Response(response.status, await response.read(), etag, request)

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float = 90.0, total: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch; iterate over its bytes as they arrive, until the server ends it.

        A watch that delivers nothing for `silence` seconds may be dead even if TCP says otherwise:
        iterating then raises Silent. `total` (seconds) bounds the whole stream. Opening and
        iterating raise as `request` does.
        """
        limits = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS, sock_read=silence)
        call = _Request("watch", "GET", path, query, limits)
        async with self._open(call) as response:
            try:
                yield _Chunks(response.content, call)
            finally:
                # The stream may be left early: do not wait for a dead peer's TLS close.
                if response.connection is not None and response.connection.transport is not None:
                    response.connection.transport.abort()

    @asynccontextmanager
    async def _open(self, call: _Request) -> AsyncIterator[aiohttp.ClientResponse]:
        authorization = await self._authority.authorization()
        try:
            response = await self._send(call, authorization)
        except ApiError as error:
            if error.status != 401:
                raise
            renewed = await self._authority.authorization(refused=authorization)
            if renewed == authorization:
                raise
            response = await self._send(call, renewed)
        async with response:
            yield response

    async def _send(self, call: _Request, authorization: str) -> aiohttp.ClientResponse:
        headers = dict(call.headers)
        if authorization:
            headers["Authorization"] = authorization
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        started = time.monotonic()
        code = 0
        try:
            with _translate_errors(call):
                response = await self._session.request(
                    call.method,
                    self._url(call),
                    headers=headers,
                    data=call.body,
                    timeout=call.limits,
                    allow_redirects=False,
                    ssl=self._authority.endpoint.tls
                    or True,  # may change while the session is open
                    proxy=self._authority.endpoint.proxy,
                    server_hostname=self._authority.endpoint.server_hostname,
                )
                code = response.status
                if code >= 300:
                    async with response:
                        body = await response.read()
        finally:
            self._observe(call.verb, resource_of(call.path), code, time.monotonic() - started)
        if code >= 300:
            raise ApiError.from_answer(code, body, response.headers.get("Retry-After", ""))
        return response

    def _url(self, call: _Request) -> yarl.URL:
        # A name from an object must not change the path: "?" is quoted, ".." is refused.
        if ".." in call.path.split("/"):
            raise ApiError(400, "BadRequest", f"{call.path!r} is not a path of the API")
        path = self._server.path.rstrip("/") + call.path
        return self._server.with_path(path).with_query(dict(call.query))


class _Chunks(AsyncIterator[bytes]):
    """The bytes of a watch: a class, because a generator would outlive a `break`."""

    def __init__(self, content: aiohttp.StreamReader, call: _Request) -> None:
        self._content = content
        self._call = call

    async def __anext__(self) -> bytes:
        with _translate_errors(self._call):
            try:
                chunk = await self._content.readany()
            except aiohttp.SocketTimeoutError as error:
                raise Silent(
                    f"{self._call.method} {self._call.path}: {_describe_error(error)}"
                ) from error
        if not chunk:
            raise StopAsyncIteration
        return chunk


@contextmanager
def _translate_errors(call: _Request) -> Iterator[None]:
    request = f"{call.method} {call.path}"
    try:
        yield
    except TimeoutError as error:  # includes aiohttp's timeouts
        raise Disconnected(f"{request}: timed out ({_describe_error(error)})") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Disconnected(f"{request}: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def resource_of(path: str) -> str:
    """Return the resource of a path as RBAC names it: `pods`, `jobs.batch`, `pods/status`.

    Without names and namespaces, so that values are few. Other paths return their first part.
    """
    match path.strip("/").split("/"):
        case ["api", _, *rest]:
            group = ""
        case ["apis", group, _, *rest]:
            group = f".{group}"
        case other:
            return other[0]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    plural, subresource = rest[0] if rest else "", rest[2:3]
    return "/".join([f"{plural}{group}", *subresource])
