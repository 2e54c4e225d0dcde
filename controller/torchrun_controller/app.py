"""The process: its event loop, its connection, its ports, its signals and its exit codes.

SIGTERM and SIGINT tell the controller to end. A second signal ends at once, and so does one that
comes before the controller runs. The loss of the lease does too.
"""

import asyncio
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import structlog

from torchrun_controller import logs
from torchrun_controller.cache.informer_factory import ReadErrors
from torchrun_controller.client import ConfigError, Connection, Transport
from torchrun_controller.client.permissions import Permissions
from torchrun_controller.clock import SYSTEM
from torchrun_controller.leader import NotLeader
from torchrun_controller.manager import Components, Manager, Sessions, assemble
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving.checks import caches_synced, leads_or_stands_by, watches_alive
from torchrun_controller.serving.progress.endpoint import ProgressServer
from torchrun_controller.serving.progress.tokens import Tokens
from torchrun_controller.serving.server import Server
from torchrun_controller.settings import Settings
from torchrun_controller.signals import Signals

# Exit codes.
LOST_LEASE = 1
UNUSABLE = 2  # a setting, the kubeconfig, the port
CRASHED = 70  # sysexits.h: an internal error

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def main(settings: Settings, signals: Signals | None = None) -> int:
    """Run on uvloop where there is one; returns the exit code. `signals` are installed already."""
    signals = signals or Signals().install()
    logs.configure(settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=_loop_factory(settings.uvloop)) as runner:
            return runner.run(run(settings, signals))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"torchrun-controller: {error}\n")
        return UNUSABLE
    except Exception:
        # In one line like all else, its traceback too: log collectors part lines.
        log.exception("a bug in the controller; please report it")
        return CRASHED


async def run(settings: Settings, signals: Signals) -> int:
    """Run the controller until a signal or the loss of the lease; returns the exit code.

    Raises ConfigError if there is no usable connection, OSError if the port is taken.
    """
    connection = await Connection.load(settings.kubeconfig, settings.context)
    metrics = Metrics()
    permissions = _permissions(settings, metrics)
    answers = ReadErrors(metrics.observe_request)
    # A restarted container has its pod's name, and is another process all the same.
    identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    session = partial(connection.session, identity=identity)
    grace = settings.lease_durations.grace

    async def told() -> None:
        log.info("told to end", signal=(await signals.wait()).name)

    def gate() -> None:
        parts.leader.check()

    async with (
        session("watch", answers.observe) as watch,
        session("write", permissions.observe, gate=gate, undelivered=grace) as write,
        session("lease", metrics.observe_request) as lease,
        session("review", metrics.observe_request) as review,
    ):
        sessions = Sessions(watch, write, lease, answers)
        parts = assemble(settings, sessions, metrics, SYSTEM, identity)
        server = _server(settings, parts, metrics, permissions)
        progress = _progress_server(settings, review, parts, metrics)
        async with (
            server.running(),
            progress.running() if progress else nullcontext(),
            permissions.running(review, parts.factory.discovery.groups),
        ):
            log.info(
                "serves",
                identity=identity,
                address=settings.listen_address or "*",
                port=server.port,
                progress_port=progress.port if progress else None,
            )
            try:
                await Manager(parts, told).run()
            except NotLeader as error:
                log.error("ends at once: another may lead", error=str(error))
                return LOST_LEASE
    return 0


def _loop_factory(wanted: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not wanted:
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _permissions(settings: Settings, metrics: Metrics) -> Permissions:
    return Permissions(
        settings.namespaces,
        lease_namespace=settings.lease_namespace if settings.leader_election else "",
        progress=bool(settings.progress_url),
        observe=metrics.observe_request,
    )


def _server(
    settings: Settings, parts: Components, metrics: Metrics, permissions: Permissions
) -> Server:
    factory = parts.factory
    return Server(
        settings.listen_address,
        settings.listen_port,
        metrics=metrics,
        live={"watches": watches_alive(factory.idle_by_resource())},
        ready={
            "caches": caches_synced(factory.synced_by_resource(), factory.answers.problem),
            "lease": leads_or_stands_by(parts.leader),
            "rights": permissions.missing,
        },
        notes={
            "nodes": factory.nodes.shortcoming,
            "schedulers": factory.discovery.shortcoming,
            "rights": permissions.shortcoming,
        },
    )


def _progress_server(
    settings: Settings, transport: Transport, parts: Components, metrics: Metrics
) -> ProgressServer | None:
    if not settings.progress_url:
        return None
    queue = parts.queues["job"]
    return ProgressServer(
        settings.listen_address,
        settings.progress_port,
        leads=parts.leader.may_write,
        tokens=Tokens(transport),
        workers=parts.factory,
        reports=parts.factory.reports,
        accepted=lambda job: queue.add(job),
        metrics=metrics,
    )
