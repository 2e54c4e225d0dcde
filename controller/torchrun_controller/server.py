"""What the process says of itself over HTTP, without authentication and without secrets.

    GET /metrics    for Prometheus, in the text format or OpenMetrics
    GET /healthz    200 while the process is worth keeping alive, else 503: the kubelet restarts it
    GET /readyz     200 while it does its work (or stands by), else 503
    PUT /loglevel   from localhost only (kubectl port-forward): the body is the new level

Health and readiness are made of named checks; every answer lists each with its verdict:

    [+] caches ok
    [!] nodes: lost nodes are not noticed: grant the controller's role the verb list on nodes
    [-] lease: cannot patch lease torchrun-system/torchrun-controller: 403 Forbidden: ...

That the event loop is alive needs no check of its own: an answer is the proof.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TypeAlias

from aiohttp import web

from torchrun_controller import logs
from torchrun_controller.leader import Leadership
from torchrun_controller.metrics import Metrics

Check: TypeAlias = Callable[[], str]
"""Called at each probe; returns why it fails, "" if it does not."""

STUCK = 600.0  # seconds without a turn after which only a restart can help


def watches_alive(idle: Mapping[str, Callable[[], float]], bound: float = STUCK) -> Check:
    """Liveness: seconds since each informer last did anything, by resource, against a bound.

    It does not depend on the API server: a watch notices its own death after 90 s and is opened
    again, a request that fails is repeated, and each of that is a turn. The bound only catches an
    informer that hangs. If the server's silence counted, an outage of ten minutes would have every
    replica killed, with caches that are needed when it is back.
    """

    def check() -> str:
        stuck = [f"{name} for {age():.0f} s" for name, age in idle.items() if age() > bound]
        return f"the watch hangs of {', '.join(stuck)}" if stuck else ""

    return check


def caches_synced(
    synced: Mapping[str, Callable[[], bool]], problem: Callable[[str], str] = lambda resource: ""
) -> Check:
    """Readiness: whether each cache holds its first whole list; `problem` says what keeps it."""

    def check() -> str:
        missing = [
            f"{resource} ({problem(resource) or 'the first list is on its way'})"
            for resource, done in synced.items()
            if not done()
        ]
        return f"not listed yet: {', '.join(missing)}" if missing else ""

    return check


def leads_or_stands_by(leadership: Leadership) -> Check:
    """Readiness: the leader may write, or a standby can read the lease."""

    def check() -> str:
        if leadership.problem:
            return leadership.problem
        if leadership.elected.is_set() and not leadership.may_write():
            return "the lease is lost, the process is about to stop"
        return ""

    return check


def refusal(verb: str, resource: str, status: int, message: str) -> str:
    """Say what to do about a refused request; `status` is the HTTP code, 0 for no answer."""
    match status:
        case 403:
            advice = f"grant the controller's role the verb {verb} on {resource}"
        case 404:
            advice = f"install the CustomResourceDefinition of {resource}"
        case 0:
            advice = "the API server was not reached"
        case _:
            advice = f"HTTP {status}"
    return f"cannot {verb} {resource}: {advice} ({message})"


class Server:
    """The listening socket and its pages, while `running`."""

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
        self.port = port  # the real one while running, where 0 was asked for
        self._address = address
        self._metrics = metrics
        self._live = live
        self._ready = ready
        self._notes = notes or {}
        self._scrape = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve. Raises OSError, which names address and port, if they are taken."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/healthz", self._show_health)
        app.router.add_get("/readyz", self._show_readiness)
        app.router.add_put("/loglevel", self._set_log_level)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        listening = listen(self._address, self.port)
        self.port = listening.getsockname()[1]
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            yield
        finally:
            await runner.cleanup()

    async def _show_metrics(self, request: web.Request) -> web.Response:
        async with self._scrape:  # one at a time, however many ask
            snapshot = self._metrics.snapshot()
            accept = request.headers.get("Accept", "")
            body, content_type = await asyncio.to_thread(snapshot.render, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _show_health(self, request: web.Request) -> web.Response:
        return _verdict(self._live)

    async def _show_readiness(self, request: web.Request) -> web.Response:
        return _verdict(self._ready, self._notes)

    async def _set_log_level(self, request: web.Request) -> web.Response:
        if not _from_localhost(request):
            return web.Response(status=403, text="only from localhost, see kubectl port-forward\n")
        try:
            level = (await request.text()).strip()
            logs.set_level(level)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(text=f"{level}\n")


def _verdict(
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
    """A listening socket, for IPv6 and IPv4 where no address is given. Raises OSError."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
