"""The process: its event loop, its connection, its ports, its signals and its exit codes.

SIGTERM and SIGINT shut the controller down in order. A second signal ends the process at once, as
does a signal before the controller runs, or the loss of the lease.
"""

import asyncio  # only for event loops
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import anyio
import structlog

from torchrun_api.contract.exit_codes import CRASHED, LOST_LEASE, UNUSABLE
from torchrun_controller import logs
from torchrun_controller.client import ConfigError, Connection, Transport
from torchrun_controller.clock import SYSTEM
from torchrun_controller.leader import Leader, Leadership, LeaderThread, NoElection, NotLeader
from torchrun_controller.manager import Components, Manager, Sessions, assemble
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving.checks import caches_synced, leads_or_stands_by, watches_alive
from torchrun_controller.serving.progress.endpoint import ProgressServer
from torchrun_controller.serving.progress.tokens import Tokens
from torchrun_controller.serving.server import HttpServer
from torchrun_controller.settings import Settings
from torchrun_controller.signals import Signals

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def main(settings: Settings, signals: Signals | None = None) -> int:
    """Run on uvloop if it is installed; return the exit code.

    `signals` are the installed handlers; None installs them.
    """
    signals = signals or Signals().install()
    logs.configure(settings.log_level, settings.log_format)
    try:
        options = {"loop_factory": _loop_factory(settings.uvloop)}
        return anyio.run(run, settings, signals, backend_options=options)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"torchrun-controller: {error}\n")
        return UNUSABLE
    except Exception:
        # As one log record, because log collectors split a plain traceback at newlines.
        log.exception("a bug in the controller; please report it")
        return CRASHED


async def run(settings: Settings, signals: Signals) -> int:
    """Run the controller until a signal or the loss of the lease; return the exit code.

    Raises ConfigError if there is no usable connection, OSError if the port is taken.
    """
    connection = await Connection.load(settings.kubeconfig, settings.context)
    metrics = Metrics()
    # A restarted container has the same hostname, but it is another process.
    identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    session = partial(connection.session, identity=identity)
    grace = settings.lease_durations.grace
    leader = _leadership(settings, metrics, identity) if settings.leader_election else NoElection()

    async def wait_for_signal() -> None:
        log.info("shutting down", signal=(await signals.wait()).name)

    async with (
        session("watch", metrics.observe_request) as watch,
        session(
            "write", metrics.observe_request, before_send=leader.check, tcp_user_timeout=grace
        ) as write,
        session("review", metrics.observe_request) as review,
    ):
        components = assemble(settings, Sessions(watch, write), leader, metrics, SYSTEM)
        server = _server(settings, components, metrics)
        progress = _progress_server(settings, review, components, metrics)
        async with (
            server.running(),
            progress.running() if progress else nullcontext(),
            connection.refreshing(),
        ):
            log.info(
                "serving",
                identity=identity,
                address=settings.listen_address or "*",
                port=server.port,
                progress_port=progress.port if progress else None,
            )
            try:
                await Manager(components, wait_for_signal).run()
            except NotLeader as error:
                log.error("exiting: another replica may lead", error=str(error))
                return LOST_LEASE
    return 0


def _leadership(settings: Settings, metrics: Metrics, identity: str) -> Leadership:
    """Return the leader, which runs in a thread with its own connection."""
    loop, durations = asyncio.get_running_loop(), settings.lease_durations

    # The main loop owns the metrics.
    def observe(verb: str, resource: str, code: int, seconds: float) -> None:
        loop.call_soon_threadsafe(metrics.observe_request, verb, resource, code, seconds)

    def count_transition() -> None:
        loop.call_soon_threadsafe(metrics.lease_transitions.inc)

    @asynccontextmanager
    async def open_leader() -> AsyncIterator[Leader]:
        connection = await Connection.load(settings.kubeconfig, settings.context)
        async with (
            connection.session("lease", observe, identity=identity) as transport,
            connection.refreshing(),
        ):
            yield Leader(
                transport,
                identity=identity,
                namespace=settings.lease_namespace,
                name=settings.lease_name,
                durations=durations,
                on_transition=count_transition,
                clock=SYSTEM.monotonic,
                now=SYSTEM.wall,
                jitter=SYSTEM.jitter,
            )

    # Before the lease expires.
    return LeaderThread(open_leader, stop_seconds=durations.grace / 2)


def _loop_factory(enabled: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not enabled:
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _server(settings: Settings, components: Components, metrics: Metrics) -> HttpServer:
    factory = components.factory
    return HttpServer(
        settings.listen_address,
        settings.listen_port,
        metrics=metrics,
        live={"watches": watches_alive(factory.idle_by_resource())},
        ready={
            "caches": caches_synced(factory.unsynced),
            "lease": leads_or_stands_by(components.leader),
        },
        notes={
            "machines": factory.nodes.shortcoming,
            "schedulers": factory.discovery.shortcoming,
            "watches": factory.shortcoming,
        },
    )


def _progress_server(
    settings: Settings, transport: Transport, components: Components, metrics: Metrics
) -> ProgressServer | None:
    if not settings.progress_url:
        return None
    queue = components.queues["job"]
    return ProgressServer(
        settings.listen_address,
        settings.progress_port,
        leads=components.leader.may_write,
        tokens=Tokens(transport),
        workers=components.factory,
        reports=components.factory.reports,
        accepted=lambda job: queue.add(job),
        metrics=metrics,
    )
