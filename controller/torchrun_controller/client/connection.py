"""One server, our credentials for it, and sessions to it."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import structlog
from aiohttp.abc import AbstractStreamWriter
from msgspec.structs import replace

from torchrun_controller.client.credentials import (
    SERVICE_ACCOUNT,
    Credentials,
    Endpoint,
    Kubeconfig,
    ServiceAccount,
    home_kubeconfig,
    in_cluster,
    kubeconfig_path,
)
from torchrun_controller.client.errors import ConfigError
from torchrun_controller.client.session import Observe, Transport

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

# How often client-go re-reads a token file, too.
REREAD_SECONDS = 60.0
# A request waits so long for credentials that are only to be fresher; then the old ones go. Reading
# a mounted token takes no time; a credential plugin may take a minute, and the lease has not that.
REREAD_PATIENCE = 1.0


class Connection:
    """The server and a fresh Authorization header; shared by all sessions."""

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: Credentials,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self._credentials = credentials
        self._clock = clock
        self._lock = asyncio.Lock()  # the reader of a kubeconfig does one thing at a time
        # One of each kind at a time. They go on when the request that waits for them ends.
        self._reading: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._authorization: str | None = None  # None: never read
        self._read_at = 0.0

    @classmethod
    async def load(
        cls,
        kubeconfig: str | None = None,
        context: str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        service_account: Path = SERVICE_ACCOUNT,
    ) -> "Connection":
        """Find the server: `kubeconfig`, $KUBECONFIG, the pod's service account, ~/.kube/config.

        Raises ConfigError.
        """
        path = kubeconfig_path(kubeconfig, environ)
        if path is None and context is None:
            endpoint = in_cluster(environ, service_account)
            if endpoint is not None:
                account = ServiceAccount(service_account, endpoint.tls)
                return await cls(endpoint, account)._authorized()
        credentials = Kubeconfig(path or home_kubeconfig(environ), context)
        return await cls(await credentials.endpoint(), credentials)._authorized()

    @property
    def namespace(self) -> str:
        """The namespace of our pod, or of the kubeconfig's context."""
        return self.endpoint.namespace

    async def _authorized(self) -> "Connection":
        await self.authorization()
        return self

    async def authorization(self, refused: str | None = None) -> str:
        """Return the Authorization header, "" for none, read again once it is 60 s old.

        `refused` is the value that the server has just answered with 401: it is renewed, once,
        however many requests were refused with it, and all of them wait. After `load` a failure
        keeps the old value, and so does a credential plugin that takes its time.
        """
        if self._authorization is None:
            await asyncio.shield(self._read_again())
        elif refused is not None and refused == self._authorization:
            await asyncio.shield(self._renew(refused))
        elif self._clock() - self._read_at >= REREAD_SECONDS:
            await asyncio.wait({self._read_again()}, timeout=REREAD_PATIENCE)
        assert self._authorization is not None
        return self._authorization

    def _read_again(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            self._read_at = self._clock()
            self._reading = asyncio.create_task(self._read(self._credentials.read))
        return self._reading

    def _renew(self, refused: str) -> asyncio.Task[None]:
        if self._renewing is None or self._renewing.done():
            self._read_at = self._clock()
            self._renewing = asyncio.create_task(self._read(self._credentials.renew, refused))
        return self._renewing

    async def _read(self, read: Callable[[], Awaitable[str]], refused: str | None = None) -> None:
        async with self._lock:
            if refused is not None and refused != self._authorization:
                return  # what was read meanwhile is another value
            try:
                self._authorization = await read()
                self._trust_anew()
            except Exception as error:
                if self._authorization is None:
                    raise
                said = "credentials could not be read again, the old ones stay"
                # What is no ConfigError is a bug, and no reason to have every request fail.
                unexpected = not isinstance(error, ConfigError)
                log.warning(said, error=str(error), exc_info=unexpected)

    def _trust_anew(self) -> None:
        """New connections go by the present CA; those that are open stay as they are."""
        tls = self._credentials.tls
        if tls is not None and tls is not self.endpoint.tls:
            self.endpoint = replace(self.endpoint, tls=tls)

    @asynccontextmanager
    async def session(
        self,
        name: str,
        observe: Observe | None = None,
        *,
        identity: str = "",
        gate: Callable[[], None] | None = None,
        undelivered: float = 0.0,
    ) -> AsyncIterator[Transport]:
        """Open a session with sockets of its own; `name` (watch, write, lease) tells them apart.

        Each HTTP/1.1 watch holds a socket: behind them in one pool, a lease would starve.
        `identity` tells replicas apart in the API server's audit log. `gate` is called when a
        socket is there and the request is about to go; what it raises, the request raises, unsent.
        What the kernel could not deliver within `undelivered` seconds (0: its default) is dropped.
        """
        agent = f"torchrun-controller/{name}" + (f" ({identity})" if identity else "")
        async with aiohttp.ClientSession(
            request_class=_gated(gate) if gate else aiohttp.ClientRequest,
            # Six watches for each watched namespace; writers bound themselves.
            connector=aiohttp.TCPConnector(
                ssl=self.endpoint.tls or True,
                limit=0,
                socket_factory=_dropping(undelivered) if undelivered else None,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Decompressing costs more than a cluster's network does: identity.
            headers={
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "User-Agent": agent,
            },
        ) as session:
            yield Transport(self, session, observe or _unobserved)


def _gated(gate: Callable[[], None]) -> type[aiohttp.ClientRequest]:
    # Not before the connection is sought: a new one takes up to 10 s, and a credential plugin more.
    class Gated(aiohttp.ClientRequest):
        async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
            gate()
            return await super().send(conn)

        # Before Python 3.12 the bytes go in a task of their own, a turn of the event loop later:
        # a process that was frozen in between had its requests left when it went on (seen).
        async def write_bytes(
            self,
            writer: AbstractStreamWriter,
            conn: aiohttp.connector.Connection,
            content_length: int | None = None,
        ) -> None:
            try:
                gate()
            except Exception as error:
                assert conn.protocol is not None, "it is kept until there is an answer"
                conn.protocol.set_exception(error)  # which is what the request waits for
                return
            await super().write_bytes(writer, conn, content_length)

    return Gated


def _dropping(undelivered: float) -> aiohttp.SocketFactoryType:
    # Else a write that was under way when the network failed arrives when it is back, a minute
    # after the end of the process that sent it (seen).
    def make(address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = round(undelivered * 1000)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return made

    return make


def _unobserved(verb: str, resource: str, code: int, seconds: float) -> None:
    """Measure nothing."""
