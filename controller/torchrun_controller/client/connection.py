"""One server, the credentials for it, and sessions to it."""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import structlog
from msgspec.structs import replace

from torchrun_controller.client.credentials import (
    SERVICE_ACCOUNT,
    Credentials,
    Endpoint,
    Kubeconfig,
    ServiceAccount,
    home_kubeconfig,
    is_in_pod,
    kubeconfig_path,
)
from torchrun_controller.client.errors import ConfigError
from torchrun_controller.client.pool import Pool
from torchrun_controller.client.rest import RestClients
from torchrun_controller.client.session import Observe, Transport

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

REREAD_SECONDS = 60.0  # as client-go re-reads a token file
# Longest wait of a request for fresher credentials. After it, the request uses the old ones: a
# credential plugin may take a minute, and the lease cannot wait that long.
REREAD_TIMEOUT = 1.0


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
        self._lock = anyio.Lock()  # the kubeconfig loader is not reentrant
        self._tasks: anyio.abc.TaskGroup | None = None  # while `refreshing`
        # Set when the current or last read, or renewal, has ended.
        self._read_end: anyio.Event | None = None
        self._renewal_end: anyio.Event | None = None
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
        if path is None and context is None and is_in_pod(environ, service_account):
            account = ServiceAccount(service_account, environ)
            return await cls(account.endpoint(), account)._with_credentials()
        credentials = Kubeconfig(path or home_kubeconfig(environ), context)
        return await cls(await credentials.endpoint(), credentials)._with_credentials()

    @property
    def namespace(self) -> str:
        """The namespace of our pod, or of the kubeconfig's context."""
        return self.endpoint.namespace

    async def _with_credentials(self) -> "Connection":
        await self.authorization()
        return self

    @asynccontextmanager
    async def refreshing(self) -> AsyncIterator[None]:
        """Read credentials in tasks of this context from now on.

        A read continues when the request that started it ends. Outside this context the request
        itself reads, and waits for the result.
        """
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None
                tasks.cancel_scope.cancel()

    async def authorization(self, refused: str | None = None) -> str:
        """Return the Authorization header, "" for none. It is read again when it is 60 s old.

        `refused` is a value that the server answered with 401. It is renewed once for all requests
        that were refused with it, and all of them wait. After `load`, the old value stays if the
        credential plugin fails or is slow.
        """
        if self._authorization is None:
            await self._read(self._credentials.read)
        elif refused is not None and refused == self._authorization:
            if self._renewal_end is None or self._renewal_end.is_set():
                self._renewal_end = await self._start_read(self._credentials.renew, refused)
            await self._renewal_end.wait()
        elif self._clock() - self._read_at >= REREAD_SECONDS:
            if self._read_end is None or self._read_end.is_set():
                self._read_end = await self._start_read(self._credentials.read)
            with anyio.move_on_after(REREAD_TIMEOUT):
                await self._read_end.wait()
        assert self._authorization is not None
        return self._authorization

    async def _start_read(
        self, read: Callable[[], Awaitable[str]], refused: str | None = None
    ) -> anyio.Event:
        """Read in a task, or here outside `refreshing`; the event is set when the read ends."""
        end = anyio.Event()
        if self._tasks is None:
            await self._read(read, refused, end)
        else:
            self._tasks.start_soon(self._read, read, refused, end)
        return end

    async def _read(
        self,
        read: Callable[[], Awaitable[str]],
        refused: str | None = None,
        end: anyio.Event | None = None,
    ) -> None:
        self._read_at = self._clock()
        try:
            async with self._lock:
                if refused is None or refused == self._authorization:
                    self._authorization = await read()
                    self._update_trust()
        except Exception as error:
            if self._authorization is None:
                raise
            # Any other error than ConfigError is a bug, but it must not fail every request.
            unexpected = not isinstance(error, ConfigError)
            message = "cannot reload the credentials; the previous ones remain in use"
            log.warning(message, error=str(error), exc_info=unexpected)
        finally:
            if end is not None:
                end.set()

    def _update_trust(self) -> None:
        """Use the current CA and client certificate for new connections; open ones keep theirs."""
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
        before_send: Callable[[], None] | None = None,
        tcp_user_timeout: float = 0.0,
    ) -> AsyncIterator[Transport]:
        """Open a session with its own sockets. `name` (watch, write, lease) is in its User-Agent.

        `identity` distinguishes replicas in the API server's audit log. `before_send` is called
        just before the bytes of a short request are written to an open socket. If it raises, the
        request raises the same error and is not sent. The kernel drops the bytes of short requests
        that the peer does not acknowledge within `tcp_user_timeout` seconds (0: its default).
        """
        agent = f"torchrun-controller/{name}" + (f" ({identity})" if identity else "")
        # Within a cluster, decompression takes longer than the transfer of uncompressed bytes.
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": agent,
        }
        pool, rest = Pool(before_send, tcp_user_timeout), RestClients()
        try:
            yield Transport(self, pool, rest, observe or _ignore_request, headers)
        finally:
            pool.close()
            await rest.close()


def _ignore_request(verb: str, resource: str, code: int, seconds: float) -> None:
    """Do nothing."""
