"""Metrics, health and readiness over HTTP. There is no authentication, and there are no secrets.

    GET /metrics    for Prometheus, in the text format or OpenMetrics
    GET /healthz    200, or 503 if only a restart helps
    GET /readyz     200 for a leader or standby that works, else 503
    PUT /loglevel   from localhost only (kubectl port-forward): the body is the new level

Health and readiness consist of named checks; each response lists all of them with their results:

    [+] caches ok
    [!] machines: lost machines are not detected: grant the controller's role the verb list on nodes
    [-] lease: cannot patch lease torchrun-system/torchrun-controller: 403 Forbidden: ...

The event loop needs no check: each response shows that it runs. Each response ends its connection,
and the number and duration of connections are limited (`connections`).
"""

import asyncio  # only for create_server, which aiohttp's handlers need
import ipaddress
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import anyio
import anyio.to_thread
from aiohttp import web

from torchrun_controller import logs
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving.checks import Check
from torchrun_controller.serving.connections import SERVER_LOG, ConnectionLimit


class HttpServer:
    """The HTTP server, while `running`.

    `live` and `ready` are the checks of /healthz and /readyz by name; `notes` are limitations that
    /readyz lists without failing.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        metrics: Metrics,
        live: Mapping[str, Check],
        ready: Mapping[str, Check],
        notes: Mapping[str, Check] | None = None,
    ) -> None:
        self.port = port  # the real port while running, also if 0 was given
        self._address = address
        self._metrics = metrics
        self._live = live
        self._ready = ready
        self._notes = notes or {}
        self._scrape = anyio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve. Raises OSError, which names address and port, if they are taken."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/healthz", self._show_health)
        app.router.add_get("/readyz", self._show_readiness)
        app.router.add_put("/loglevel", self._set_log_level)
        app.on_response_prepare.append(_end_connection)
        runner = web.AppRunner(app, access_log=None, logger=SERVER_LOG, shutdown_timeout=1)
        listening = listen(self._address, self.port)
        self.port = listening.getsockname()[1]
        await runner.setup()
        assert runner.server is not None
        limit = ConnectionLimit(runner.server)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(limit.new_protocol, sock=listening)
        try:
            yield
        finally:
            server.close()
            limit.close()
            await runner.cleanup()

    async def _show_metrics(self, request: web.Request) -> web.Response:
        async with self._scrape:  # one scrape at a time
            snapshot = self._metrics.snapshot()
            accept = request.headers.get("Accept", "")
            body, content_type = await anyio.to_thread.run_sync(snapshot.render, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _show_health(self, request: web.Request) -> web.Response:
        return _result(self._live)

    async def _show_readiness(self, request: web.Request) -> web.Response:
        return _result(self._ready, self._notes)

    async def _set_log_level(self, request: web.Request) -> web.Response:
        if not _from_localhost(request):
            return web.Response(status=403, text="only from localhost, see kubectl port-forward\n")
        try:
            level = (await request.text()).strip()
            logs.set_level(level)
        except (ValueError, LookupError) as error:  # of the level, or of an unknown charset
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(text=f"{level}\n")


async def _end_connection(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after the response, so that its time limit cuts no later one."""
    response.headers["Connection"] = "close"
    response.force_close()


def _result(
    checks: Mapping[str, Check], notes: Mapping[str, Check] = MappingProxyType({})
) -> web.Response:
    reasons = {name: check() for name, check in checks.items()}
    lines = [f"[-] {name}: {why}" if why else f"[+] {name} ok" for name, why in reasons.items()]
    lines += [f"[!] {name}: {note}" for name, check in notes.items() if (note := check())]
    status = 503 if any(reasons.values()) else 200
    return web.Response(status=status, text="\n".join(lines) + "\n")


def _from_localhost(request: web.Request) -> bool:
    forwarded = "Forwarded" in request.headers or "X-Forwarded-For" in request.headers
    peer = ipaddress.ip_address(request.remote or "::")
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped:
        peer = peer.ipv4_mapped
    return not forwarded and peer.is_loopback


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; "" listens on all IPv6 and IPv4 addresses. Raises OSError."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
