"""Short requests and streams to one server."""

import gzip
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Protocol, TypeAlias, TypeVar

import aiohttp
import yarl
from msgspec import Struct

from torchrun_controller.client.credentials import Endpoint
from torchrun_controller.client.errors import ApiError, Disconnected, InvalidResponse, Silent
from torchrun_controller.client.http1 import (
    HttpError,
    HttpResponse,
    encode_request,
    encode_target,
)
from torchrun_controller.client.pool import CONNECT_SECONDS, Pool
from torchrun_controller.client.rest import RestClients

# Called with the verb ("get", "patch", "watch"), the resource ("jobs.batch"), the HTTP code (0: no
# response) and the seconds until the response's headers.
Observe: TypeAlias = Callable[[str, str, int, float], None]

T = TypeVar("T")

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
    """A request; `verb` and the resource of `path` are its labels in metrics."""

    verb: str
    method: str
    path: str
    query: Mapping[str, str]
    timeout: float
    body: bytes | None = None
    headers: Mapping[str, str] = _NO_HEADERS

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class _Access(Struct, frozen=True):
    """The credentials of one request. Its endpoint has the client certificate."""

    authorization: str
    endpoint: Endpoint

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": self.authorization} if self.authorization else _NO_HEADERS


class Transport:
    """Sends requests and opens streams. Every failure is an ApiError or Disconnected.

    Short requests use `pool`, lists and streams use `rest`. `headers` are sent with each.
    """

    def __init__(
        self,
        authority: Authority,
        pool: Pool,
        rest: RestClients,
        observe: Observe,
        headers: Mapping[str, str],
    ) -> None:
        self._authority = authority
        self._pool = pool
        self._rest = rest
        self._observe = observe
        server = yarl.URL(authority.endpoint.server)
        self._headers = headers
        self._host = {"Host": server.raw_authority}
        self._origin = str(server.origin())
        self._prefix = server.raw_path.rstrip("/")

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = _NO_QUERY,
        body: bytes | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] = _NO_HEADERS,
        timeout: float = 30.0,  # noqa: ASYNC109 one timer for a request, see Pool
    ) -> Response:
        """Send one request and read the complete response within `timeout` seconds.

        Raises ApiError for a status of 300 and above, and Disconnected without a complete response.
        A request refused with 401 is sent once more if the credentials could be renewed: the
        Authorization header, or the client certificate, which makes another endpoint.
        """
        if body is not None:
            headers = {**headers, "Content-Type": content_type}
        call = _Request(method.lower(), method, path, query, timeout, body, headers)
        access = await self._access()
        response = await self._exchange(call, access)
        if response.status == 401:
            renewed = await self._access(refused=access)
            if renewed != access:
                response = await self._exchange(call, renewed)
        with _translate_errors(call):
            content = _decompress(response)
        if response.status >= 300:
            retry_after = response.headers.get("retry-after", "")
            raise ApiError.from_answer(response.status, content, retry_after)
        return Response(response.status, content, response.headers.get("etag", ""), str(call))

    async def read_list(
        self,
        path: str,
        *,
        query: Mapping[str, str] = _NO_QUERY,
        headers: Mapping[str, str] = _NO_HEADERS,
        timeout: float = 60.0,  # noqa: ASYNC109 aiohttp's timers
    ) -> Response:
        """Read a list, or a page of one, within `timeout` seconds. Raises as `request` does."""
        call = _Request("get", "GET", path, query, timeout, headers=headers)
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        async with self._open(call, limits) as response:
            with _translate_errors(call):
                body = await response.read()
        return Response(response.status, body, response.headers.get("ETag", ""), str(call))

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float = 90.0, total: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch; iterate over its bytes as they arrive, until the server ends it.

        A watch that delivers nothing for `silence` seconds may be dead even if TCP says otherwise:
        iterating then raises Silent. `total` (seconds) bounds the whole stream. Opening and
        iterating raise as `request` does.
        """
        call = _Request("watch", "GET", path, query, total)
        limits = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS, sock_read=silence)
        async with self._open(call, limits) as response:
            try:
                yield _Chunks(response.content, call)
            finally:
                # The stream may be left early: do not wait for a dead peer's TLS close.
                if response.connection is not None and response.connection.transport is not None:
                    response.connection.transport.abort()

    async def _access(self, refused: "_Access | None" = None) -> "_Access":
        """Return the present credentials, renewed if they are those that were refused."""
        value = None if refused is None else refused.authorization
        return _Access(await self._authority.authorization(value), self._authority.endpoint)

    async def _exchange(self, call: _Request, access: "_Access") -> HttpResponse:
        headers = {**self._host, **self._headers, **call.headers, **access.headers}
        target = self._target(call)
        started = time.monotonic()
        code = 0
        try:
            with _translate_errors(call):
                request = encode_request(call.method, target, headers, call.body)
                response = await self._pool.exchange(access.endpoint, request, call.timeout)
            code = response.status
        finally:
            self._observe(call.verb, resource_of(call.path), code, time.monotonic() - started)
        return response

    @asynccontextmanager
    async def _open(
        self, call: _Request, limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a response for lists and watches, once more after a 401 with fresh credentials."""
        async with AsyncExitStack() as stack:
            access = await self._access()
            try:
                response = await self._start_response(stack, call, limits, access)
            except ApiError as error:
                if error.status != 401:
                    raise
                renewed = await self._access(refused=access)
                if renewed == access:
                    raise
                response = await self._start_response(stack, call, limits, renewed)
            yield response

    async def _start_response(
        self,
        stack: AsyncExitStack,
        call: _Request,
        limits: aiohttp.ClientTimeout,
        access: "_Access",
    ) -> aiohttp.ClientResponse:
        target = self._target(call)
        started = time.monotonic()
        code, body = 0, b""
        try:
            with _translate_errors(call):
                rest = await stack.enter_async_context(self._rest.client(access.endpoint))
                response: aiohttp.ClientResponse = await rest.request(
                    call.method,
                    self._origin + target,
                    headers={**self._headers, **call.headers, **access.headers},
                    _preload_content=False,
                    _request_timeout=limits,
                )
                await stack.enter_async_context(response)
                # The library follows redirects, but the API has none.
                first = response.history[0] if response.history else response
                code = first.status
                if code >= 300:
                    body = await response.read()
        finally:
            self._observe(call.verb, resource_of(call.path), code, time.monotonic() - started)
        if code >= 300:
            raise ApiError.from_answer(code, body, first.headers.get("Retry-After", ""))
        return response

    def _target(self, call: _Request) -> str:
        return encode_target(self._prefix + _safe_path(call.path), call.query)


def _safe_path(path: str) -> str:
    # A name from an object must not change the path: "?" is quoted later, ".." is refused.
    if ".." in path.split("/"):
        raise ApiError(400, "BadRequest", f"{path!r} is not a path of the API")
    return path


def _decompress(response: HttpResponse) -> bytes:
    """Return the body; a proxy may compress it although it was not asked to."""
    match response.headers.get("content-encoding", "identity"):
        case "identity":
            return response.body
        case "gzip":
            try:
                return gzip.decompress(response.body)
            except (EOFError, zlib.error, OSError) as error:
                raise HttpError(f"the body is not gzip ({error})") from error
        case other:
            raise HttpError(f"unknown Content-Encoding {other!r}")


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
                raise Silent(f"{self._call}: {_describe_error(error)}") from error
        if not chunk:
            raise StopAsyncIteration
        return chunk


@contextmanager
def _translate_errors(call: _Request) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:  # includes aiohttp's timeouts
        raise Disconnected(f"{call}: timed out ({_describe_error(error)})") from error
    except (aiohttp.ClientError, OSError, HttpError, ValueError) as error:
        raise Disconnected(f"{call}: {_describe_error(error)}") from error


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
