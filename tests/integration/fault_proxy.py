"""An HTTP proxy between a controller and the API server that injects faults.

A `FaultProxy` speaks plain HTTP to its clients and TLS to the API server, as the administrator.
Its `Faults` decide what happens to each request and each watch event. The relay in relay.py works
below TLS, so it can only cut connections.
"""

import asyncio
import json
import random
import re
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import yarl
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey

from torchrun_cluster import LocalCluster
from torchrun_controller.client.credentials import tls_context
from web_server import listening

LARGEST = 64 << 20  # bytes of a request
_AGENT = re.compile(r"torchrun-controller/(\w+)(?: \((\S+)\))?")
_OF_CONNECTION = frozenset(
    {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"}
)


class Severed(Exception):  # noqa: N818 named for the state
    """The connection breaks here."""


class Call(NamedTuple):
    """A request in flight. `session` and `who` identify a controller; "" for other clients."""

    session: str
    who: str
    method: str  # WATCH for one that opens a stream
    path: str
    query: str


class RequestFault:
    """No fault of one request. Overridden steps may raise Severed, wait, or end a process."""

    async def sent(self, call: Call) -> web.Response | None:
        """The client has sent it. A returned response replaces the server's."""

    async def carried_out(self, call: Call) -> None:
        """The server has processed it, and the client has no response yet."""

    async def received(self, call: Call) -> None:
        """The client has the response."""


class Faults:
    """No faults."""

    def request(self, call: Call) -> RequestFault:
        """The fault of this request."""
        return RequestFault()

    async def event(self, call: Call, line: bytes) -> bytes:
        """The line that the client gets for this watch line. May raise Severed, or wait."""
        return line


class _Connector(aiohttp.TCPConnector):
    """Aborts connections: an orderly end of TLS waits for the API server, and the loop may not."""

    def _release(
        self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False
    ) -> None:
        if should_close or protocol.should_close:
            protocol.abort()
        super()._release(key, protocol, should_close=should_close)


class FaultProxy:
    """Runs in its own thread. Clients use its `kubeconfig`."""

    def __init__(self, cluster: LocalCluster, folder: Path, faults: Faults | None = None) -> None:
        self.kubeconfig = folder / "kubeconfig-of-the-proxy"
        self.cut = 0  # the number of watches so far
        self.faults = faults or Faults()
        self._cluster = cluster
        self._loop = asyncio.new_event_loop()
        self._watches: list[web.Request] = []
        self._server: aiohttp.ClientSession

    @contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Until the end of the block."""
        ready, over = threading.Event(), asyncio.Event()

        async def serve() -> None:
            async for port in self._serving():
                self._write_kubeconfig(port)
                ready.set()
                await over.wait()

        def run() -> None:
            # Cancels running requests, and closes the connections to the API server.
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(serve())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert ready.wait(120)
            yield self
        finally:
            self._loop.call_soon_threadsafe(over.set)
            thread.join()

    def cut_watches(self, chance: random.Random, share: float) -> None:
        """Break each open watch with this probability."""

        def cut() -> None:
            for watch in sorted(self._watches, key=lambda request: request.raw_path):
                if chance.random() < share:
                    self.cut += 1
                    _sever(watch)

        self._loop.call_soon_threadsafe(cut)

    async def _serving(self) -> AsyncIterator[int]:
        tls = tls_context(str(self._cluster.ca_file))
        tls.load_cert_chain(self._cluster.client_certificate, self._cluster.client_key)
        application = web.Application(client_max_size=LARGEST)
        application.router.add_route("*", "/{path:.*}", self._handle)
        # The watches of a dead client end.
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        async with (
            aiohttp.ClientSession(
                connector=_Connector(ssl=tls, limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            ) as self._server,
            listening(runner) as port,
        ):
            yield port
            for watch in list(self._watches):
                _sever(watch)

    def _write_kubeconfig(self, port: int) -> None:
        config = json.loads(self._cluster.kubeconfig.read_text())
        for known in config["clusters"]:
            known["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(json.dumps(config))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        call = _call(request)
        try:
            fault = self.faults.request(call)
            instead = await fault.sent(call)
            return instead or await self._forward(request, call, fault)
        except (Severed, aiohttp.ClientError, OSError):
            _sever(request)
            return web.Response(status=502)  # the client is gone

    async def _forward(
        self, request: web.Request, call: Call, fault: RequestFault
    ) -> web.StreamResponse:
        url = yarl.URL(self._cluster.server + request.raw_path, encoded=True)
        body = await request.read() if request.can_read_body else None
        headers = _without_hops(request.headers.items())
        async with self._server.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            headers = _without_hops(answer.headers.items())
            if call.method == "WATCH" and answer.status == 200:
                response = web.StreamResponse(status=answer.status, headers=headers)
                await fault.carried_out(call)
                await response.prepare(request)
                await fault.received(call)
                await self._stream(request, call, answer, response)
                return response
            whole = web.Response(status=answer.status, headers=headers, body=await answer.read())
        await fault.carried_out(call)
        await whole.prepare(request)
        await whole.write_eof()
        await fault.received(call)
        return whole

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        answer: aiohttp.ClientResponse,
        response: web.StreamResponse,
    ) -> None:
        self._watches.append(request)
        try:
            buffered = b""
            async for chunk in answer.content.iter_any():
                *lines, buffered = (buffered + chunk).split(b"\n")
                for line in lines:
                    if handed := await self.faults.event(call, line + b"\n"):
                        await response.write(handed)
        finally:
            self._watches.remove(request)


def _call(request: web.Request) -> Call:
    agent = _AGENT.match(request.headers.get("User-Agent", ""))
    method = "WATCH" if request.query.get("watch") == "true" else request.method
    session, who = (agent[1], agent[2] or "") if agent else ("", "")
    return Call(session, who, method, request.path, request.query_string)


def _without_hops(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _OF_CONNECTION}


def _sever(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
