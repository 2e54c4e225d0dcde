"""Connections to one server for short requests, each used by one request at a time.

They are asyncio's protocols: anyio's streams have no callbacks, and do TLS in Python.
"""

import asyncio
import base64
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import cast

import aiohappyeyeballs

from torchrun_controller.client.credentials import Endpoint
from torchrun_controller.client.http1 import (
    HttpError,
    HttpResponse,
    ResponseParser,
    encode_request,
)

CONNECT_SECONDS = 10.0
# A name may have several addresses. While one does not answer, the next one is tried after this
# time, as aiohttp does it for watches.
NEXT_ADDRESS_SECONDS = 0.25
# Longest pause after which a connection is used again. Go's servers, kube-apiserver among them,
# close it after 90 s, and a request that is sent at that moment is lost.
IDLE_SECONDS = 85.0
LONGEST_PROXY_ANSWER = 65_536  # bytes of its headers


class Pool:
    """The connections of one session.

    `before_send` is called just before the bytes of a request are written to an open connection.
    If it raises, nothing is sent. The kernel drops data that the peer does not acknowledge within
    `tcp_user_timeout` seconds (0: the kernel's default).
    """

    def __init__(
        self,
        before_send: Callable[[], None] | None = None,
        tcp_user_timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._before_send = before_send
        self._tcp_user_timeout = tcp_user_timeout
        self._clock = clock
        self._idle: list[_Connection] = []
        self._is_closed = False

    async def exchange(
        self,
        endpoint: Endpoint,
        request: bytes,
        timeout: float,  # noqa: ASYNC109 a timer costs less than a cancel scope
    ) -> HttpResponse:
        """Send one encoded request and return the complete response, within `timeout` seconds.

        Raises OSError, TimeoutError, HttpError, and what `before_send` raises.
        """
        deadline = self._clock() + timeout
        connection = self._take_idle(endpoint)
        if connection is None:
            async with asyncio.timeout(min(timeout, CONNECT_SECONDS)):
                connection = await self._connect(endpoint)
        try:
            if self._before_send is not None:
                self._before_send()
            response = await connection.exchange(request, deadline - self._clock())
        except BaseException:
            connection.abort()
            raise
        if response.keep_alive and not self._is_closed:
            connection.idle_since = self._clock()
            self._idle.append(connection)
        else:
            connection.abort()
        return response

    def close(self) -> None:
        """Close the idle connections now, and the others after their request."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().abort()

    def _take_idle(self, endpoint: Endpoint) -> "_Connection | None":
        """Return the connection that was used last, and close those that cannot be used again."""
        while self._idle:
            connection = self._idle.pop()
            age = self._clock() - connection.idle_since
            if connection.is_open and connection.endpoint is endpoint and age < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self, endpoint: Endpoint) -> "_Connection":
        url = urllib.parse.urlsplit(endpoint.server)
        host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        tls: ssl.SSLContext | bool | None = None
        name = None
        if url.scheme == "https":
            tls = True if endpoint.tls is None else endpoint.tls.context
            name = endpoint.server_hostname or host
        if endpoint.proxy is None:
            sock = await _connect_socket(host, port)
        else:
            sock = await _open_tunnel(endpoint.proxy, host, port)
        loop = asyncio.get_running_loop()
        connection = _Connection(loop, endpoint)
        await loop.create_connection(lambda: connection, sock=sock, ssl=tls, server_hostname=name)
        if self._tcp_user_timeout:
            connection.set_user_timeout(self._tcp_user_timeout)
        return connection


class _Connection(asyncio.Protocol):
    """One connection. `endpoint` is the one that it was opened for: a new CA makes another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.is_open = False
        self.idle_since = 0.0
        self._loop = loop
        self._parser = ResponseParser()
        self._transport: asyncio.Transport
        self._response: asyncio.Future[HttpResponse] | None = None  # during a request

    async def exchange(self, request: bytes, seconds: float) -> HttpResponse:
        """Send a request and wait for its response. Raises as Pool.exchange."""
        if not self.is_open:
            raise ConnectionResetError("the server closed the connection")
        response: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._response = response
        timer = self._loop.call_later(seconds, self._fail, TimeoutError())
        self._transport.write(request)
        try:
            return await response
        finally:
            self._response = None
            timer.cancel()

    def abort(self) -> None:
        """Close the connection without waiting for the peer."""
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    def set_user_timeout(self, seconds: float) -> None:
        """Let the kernel drop data that is not acknowledged within this time."""
        # Without this limit, a write that is in flight when the network fails may arrive once it is
        # back, a minute after its process has ended (observed).
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._response is None or self._response.done():
            self.abort()  # the next request must not take these bytes for its response
            return
        try:
            response = self._parser.feed(data)
        except HttpError as error:
            self._fail(error)
            return
        if response is not None:
            self._response.set_result(response)

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        self.is_open = False
        if self._response is None or self._response.done():
            return
        try:
            if error is not None:
                raise error
            self._response.set_result(self._parser.end())
        except Exception as failure:
            self._response.set_exception(failure)

    def _fail(self, error: Exception) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)


async def _open_tunnel(proxy: str, host: str, port: int) -> socket.socket:
    """Connect to `host` and `port` through an HTTP proxy. Raises OSError and HttpError."""
    url = urllib.parse.urlsplit(proxy)
    if url.scheme != "http":
        raise HttpError(f"the proxy {url.scheme}://{url.hostname} is not an http:// proxy")
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    headers = {"Host": authority}
    if url.username is not None:
        user = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    try:
        sock = await _connect_socket(url.hostname or "", url.port or 80)
    except OSError as error:
        place = f"{url.hostname}:{url.port or 80}"
        raise OSError(f"cannot connect to the proxy {place} ({error})") from error
    try:
        status = await _ask_proxy(sock, encode_request("CONNECT", authority, headers, None))
        if status != 200:
            raise HttpError(f"the proxy {url.hostname} answered {status} to CONNECT {authority}")
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of the name that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return await aiohappyeyeballs.start_connection(
        addresses, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS
    )


async def _ask_proxy(sock: socket.socket, request: bytes) -> int:
    """Send a CONNECT request and return the status. The server is silent until TLS begins."""
    loop, answer = asyncio.get_running_loop(), b""
    await loop.sock_sendall(sock, request)
    while b"\r\n\r\n" not in answer:
        received = await loop.sock_recv(sock, 4096)
        if not received or len(answer) > LONGEST_PROXY_ANSWER:
            raise HttpError("the proxy did not answer CONNECT")
        answer += received
    match answer.split(b" ", 2):
        case [b"HTTP/1.1" | b"HTTP/1.0", status, _] if status.isdigit():
            return int(status)
    raise HttpError("the proxy did not answer CONNECT with HTTP")
