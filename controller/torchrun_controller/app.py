"""Wiring: what the controller is made of, and in which order it starts and ends.

Start: the informers and the server at once; workers when every cache is filled and this process
leads. End (SIGTERM, SIGINT): no more keys are taken, writes under way are finished, events are
flushed, the lease is released. A second signal ends at once. The loss of the lease does too.
"""

import asyncio
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import anyio.abc
import structlog

from torchrun_controller import logs
from torchrun_controller.admission_watch import AdmissionWatch
from torchrun_controller.apply import Applier
from torchrun_controller.controllers.admission import AdmissionReconciler
from torchrun_controller.controllers.job import JobReconciler
from torchrun_controller.controllers.queue import QueueReconciler
from torchrun_controller.controllers.writes import Writes
from torchrun_controller.events import EventRecorder
from torchrun_controller.leader import Leader, Leadership, NotLeader, Solo
from torchrun_controller.metrics import Metrics
from torchrun_controller.observe import Key
from torchrun_controller.own_writes import ReadYourWrites
from torchrun_controller.progress.endpoint import ProgressServer
from torchrun_controller.progress.tokens import Tokens
from torchrun_controller.queue_watch import QueueWatch
from torchrun_controller.reader import Answers, Reader
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.observed import Defaults
from torchrun_controller.reconcile.queues import reconcile_queue
from torchrun_controller.server import Server, leads_or_stands_by
from torchrun_controller.settings import Settings
from torchrun_controller.transport import ConfigError, Connection, Transport
from torchrun_controller.worker import Worker
from torchrun_controller.workqueue import AsyncWorkQueue

DRAIN_SECONDS = 10.0  # for reconciles under way when the process is told to end
QUEUE_WORKERS = 2  # queues are few and change seldom
FLUSH_SECONDS = 2.0  # for events that wait, likewise

# Exit codes.
LOST_LEASE = 1
UNUSABLE = 2  # a setting, the kubeconfig, the port

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def main(settings: Settings) -> int:
    """Run on uvloop where there is one; returns the exit code."""
    logs.configure(settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=_loop_factory(settings.uvloop)) as runner:
            return runner.run(run(settings))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"torchrun-controller: {error}\n")
        return UNUSABLE


async def run(settings: Settings) -> int:
    """Run the controller until a signal or the loss of the lease; returns the exit code.

    Raises ConfigError if there is no usable connection, OSError if the port is taken.
    """
    connection = await Connection.load(settings.kubeconfig, settings.context)
    metrics = Metrics()
    answers = Answers(metrics.observe_request)
    # A session each, so that neither watches nor a burst of writes keep the lease from its socket.
    async with (
        connection.session("watch", answers.observe) as watch,
        connection.session("write", metrics.observe_request) as write,
        connection.session("lease", metrics.observe_request) as lease,
        connection.session("review", metrics.observe_request) as review,
    ):
        leader = _leader(settings, lease, metrics)
        queue: AsyncWorkQueue[Key] = _work_queue("job", metrics)
        reader = Reader(watch, answers, queue, metrics, settings.namespaces)
        events = EventRecorder(write, leader, time.monotonic)
        applier = Applier(write, leader)
        queues: AsyncWorkQueue[Key] = _work_queue("queue", metrics)
        queue_watch = QueueWatch(watch, reader.observer, reader, queues)
        workers = (
            _job_worker(settings, queue, reader, events, applier, metrics),
            _queue_worker(settings, queues, queue_watch, events, applier, metrics),
            _admission_worker(settings, reader, events, applier, metrics),
        )
        metrics.leadership(leader.may_write)
        reader.count(metrics)
        server = Server(
            settings.listen_address,
            settings.listen_port,
            metrics=metrics,
            live={"watches": reader.liveness()},
            ready={"caches": reader.readiness(), "lease": leads_or_stands_by(leader)},
            notes={"nodes": reader.nodes.shortcoming, "schedulers": reader.discovery.shortcoming},
        )
        progress = _progress_server(settings, review, leader, reader, queue, metrics)
        controller = Controller(reader, queue_watch, leader, events, workers)
        async with server.running(), progress.running() if progress else nullcontext():
            log.info(
                "serves",
                address=settings.listen_address or "*",
                port=server.port,
                progress_port=progress.port if progress else None,
            )
            try:
                await controller.run()
            except NotLeader as error:
                log.error("ends at once: another may lead", error=str(error))
                return LOST_LEASE
    return 0


class Controller:
    """The order in which the parts start and end, for one `run`."""

    def __init__(
        self,
        reader: Reader,
        queue_watch: QueueWatch,
        leader: Leadership,
        events: EventRecorder,
        workers: Sequence[Worker[Any]],
    ) -> None:
        self._reader = reader
        self._queue_watch = queue_watch
        self._leader = leader
        self._events = events
        self._workers = workers

    async def run(self) -> None:
        """Work until a signal comes, then end in order. Raises NotLeader on loss of the lease."""
        lost: list[NotLeader] = []

        async def lead() -> None:
            try:
                await self._leader.run()
            except NotLeader as error:
                lost.append(error)
                background.cancel_scope.cancel()

        async with anyio.create_task_group() as background:
            for informer in (*self._reader.informers, *self._queue_watch.informers):
                background.start_soon(informer.run)
            background.start_soon(self._reader.nodes.follow)
            background.start_soon(self._reader.discovery.run)
            background.start_soon(self._queue_watch.run_kai)
            background.start_soon(self._queue_watch.follow)
            background.start_soon(self._reader.groups.run)
            background.start_soon(lead)
            background.start_soon(self._events.run)
            await self._work_until_told()
            background.cancel_scope.cancel()
        if lost:
            raise lost[0]
        await self._events.flush(FLUSH_SECONDS)
        await self._leader.release()

    async def _work_until_told(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._start_workers, tasks)
            await _signal()
            log.info("ends: no more keys are taken", drain_seconds=DRAIN_SECONDS)
            for worker in self._workers:
                worker.shut_down()
            tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS
            if not (self._leader.elected.is_set() and self._reader.is_synced):
                tasks.cancel_scope.cancel()

    async def _start_workers(self, tasks: anyio.abc.TaskGroup) -> None:
        await self._reader.synced()
        await self._reader.discovery.looked.wait()
        await self._queue_watch.settled()
        await self._leader.elected.wait()
        log.info("works", workers={worker.name: worker.concurrency for worker in self._workers})
        for worker in self._workers:
            for _ in range(worker.concurrency):
                tasks.start_soon(worker.run)


async def _signal() -> None:
    """Wait for SIGTERM or SIGINT. Afterwards they have their usual, sudden effect again."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("told to end", signal=number.name)
            return


def _loop_factory(wanted: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not wanted:
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _leader(settings: Settings, transport: Transport, metrics: Metrics) -> Leadership:
    if not settings.leader_election:
        return Solo()
    return Leader(
        transport,
        # A restarted container has its pod's name, and is another process all the same.
        identity=f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        namespace=settings.lease_namespace,
        name=settings.lease_name,
        durations=settings.lease_durations,
        on_transition=metrics.lease_transitions.inc,
    )


def _progress_server(
    settings: Settings,
    transport: Transport,
    leader: Leadership,
    reader: Reader,
    queue: AsyncWorkQueue[Key],
    metrics: Metrics,
) -> ProgressServer | None:
    if not settings.progress_url:
        return None
    return ProgressServer(
        settings.listen_address,
        settings.progress_port,
        leads=leader.may_write,
        tokens=Tokens(transport),
        workers=reader,
        reports=reader.reports,
        accepted=lambda job: queue.add(job),
        metrics=metrics,
    )


def _work_queue(name: str, metrics: Metrics) -> AsyncWorkQueue[Any]:
    """The work queue of the controller of this name, measured."""
    observer = metrics.queue_observer(name)
    queue: AsyncWorkQueue[Any] = AsyncWorkQueue(time.monotonic, observer=observer)
    metrics.watch_queue(name, queue)
    return queue


def _job_worker(
    settings: Settings,
    queue: AsyncWorkQueue[Key],
    reader: Reader,
    events: EventRecorder,
    applier: Applier,
    metrics: Metrics,
) -> Worker[Key]:
    reconciler = JobReconciler(
        observe=reader.observe,
        decide=partial(reconcile, defaults=_defaults(settings)),
        applier=applier,
        writes=Writes(applier, ReadYourWrites(reader.stores, time.monotonic), metrics),
        events=events,
        metrics=metrics,
    )
    return Worker("job", queue, reconciler, metrics, concurrency=settings.workers)


def _queue_worker(
    settings: Settings,
    queue: AsyncWorkQueue[Key],
    watch: QueueWatch,
    events: EventRecorder,
    applier: Applier,
    metrics: Metrics,
) -> Worker[Key]:
    reconciler = QueueReconciler(
        observe=watch.observe,
        decide=partial(reconcile_queue, defaults=_defaults(settings)),
        applier=applier,
        writes=Writes(applier, ReadYourWrites(watch.stores, time.monotonic), metrics),
        events=events,
    )
    return Worker("queue", queue, reconciler, metrics, concurrency=QUEUE_WORKERS)


def _defaults(settings: Settings) -> Defaults:
    return Defaults(
        runtime_image=settings.runtime_image,
        runtime_image_pull_policy=settings.runtime_image_pull_policy,
        progress_url=settings.progress_url,
        grow_after=timedelta(seconds=settings.grow_after),
    )


def _admission_worker(
    settings: Settings,
    reader: Reader,
    events: EventRecorder,
    applier: Applier,
    metrics: Metrics,
) -> Worker[str]:
    queue: AsyncWorkQueue[str] = _work_queue("admission", metrics)
    reconciler = AdmissionReconciler(
        watch=AdmissionWatch(reader, queue, by_nodes=settings.admit_by_nodes),
        decide=admit,
        applier=applier,
        events=events,
        metrics=metrics,
    )
    return Worker("admission", queue, reconciler, metrics)
