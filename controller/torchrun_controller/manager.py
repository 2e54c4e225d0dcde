"""What the controller is made of, and in which order its parts start and end.

Start: the informers at once, on a standby too; workers when every cache is filled, this process
leads, and the caches show what leaders before it have written. End, when told: no more keys are
taken, writes under way are finished, events are flushed, the lease is released. The loss of the
lease ends all at once.

Everything from here on knows the world by its sessions and its clock alone.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import anyio.abc
import structlog
from msgspec import Struct

from torchrun_controller.cache.admission_view import AdmissionView
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.informer_factory import InformerFactory, ReadErrors
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.queue_view import QueueView
from torchrun_controller.client import ApiError, Disconnected, Transport
from torchrun_controller.client.apply import Applier
from torchrun_controller.client.events import EventRecorder
from torchrun_controller.clock import Clock
from torchrun_controller.controllers.admission import AdmissionReconciler
from torchrun_controller.controllers.controller import Controller
from torchrun_controller.controllers.job import JobReconciler
from torchrun_controller.controllers.queue import QueueReconciler
from torchrun_controller.controllers.writes import Writes
from torchrun_controller.leader import Leader, Leadership, NoElection, NotLeader
from torchrun_controller.metrics.jobs import JobMetrics
from torchrun_controller.metrics.per_job import PerJobMetrics
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.metrics.watches import WatchObserver
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.queues import reconcile_queue
from torchrun_controller.settings import Settings
from torchrun_controller.workqueue import AsyncWorkQueue

DRAIN_SECONDS = 10.0  # for reconciles under way when the process is told to end
QUEUE_WORKERS = 2  # queues are few and change seldom
FLUSH_SECONDS = 1.0  # for events that wait, likewise
CATCH_UP_RETRY = 0.5
FORGET_SECONDS = 60.0  # between two looks of a standby for keys of what is gone
CATCH_UP_WARNING = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Sessions(Struct, frozen=True):
    """A session each, so that neither watches nor a burst of writes keep the lease from its socket.

    `answers` hears of each request of `watch`.
    """

    watch: Transport
    write: Transport
    lease: Transport
    answers: ReadErrors


class Components(Struct, frozen=True):
    """The parts of one process, wired. `queues` are the work queues by the names of their workers.

    `workers` take from them, in the same order.
    """

    factory: InformerFactory
    queue_watch: QueueView
    leader: Leadership
    events: EventRecorder
    queues: dict[str, AsyncWorkQueue[Any]]
    workers: Sequence[Controller[Any]]


def assemble(
    settings: Settings, sessions: Sessions, metrics: Metrics, clock: Clock, identity: str
) -> Components:
    """Wire a controller; nothing runs yet. `identity` is to be unique to the process."""
    leader = _leader(settings, sessions.lease, metrics, clock, identity)
    queues = {name: _work_queue(name, metrics, clock) for name in ("job", "queue", "admission")}
    factory = InformerFactory(
        sessions.watch,
        sessions.answers,
        queues["job"],
        settings.namespaces,
        clock,
        WatchObserver(metrics),
    )
    queue_watch = QueueView(sessions.watch, factory.observer, factory, queues["queue"])
    admission_watch = AdmissionView(
        factory,
        queues["admission"],
        by_nodes=settings.admit_by_nodes,
        cohort_namespaces=frozenset(settings.cohort_namespaces),
        node_overhead=settings.node_overhead,
    )
    events = EventRecorder(sessions.write, leader, clock.monotonic, clock.wall)
    census = _census(settings, factory, leader, metrics, clock)
    make = _Maker(settings, Applier(sessions.write, leader), events, metrics, clock)
    workers = (
        make.job_controller(queues["job"], factory),
        make.queue_controller(queues["queue"], queue_watch),
        make.admission_controller(queues["admission"], admission_watch, census),
    )
    lease = f"{settings.lease_namespace}/{settings.lease_name}" if settings.leader_election else ""
    metrics.leadership(leader.may_write, lease, settings.namespaces)
    metrics.total_progress(factory.reports.totals)
    for resource, objects in factory.objects_by_resource().items():
        metrics.count_objects(resource, objects)
    for resource, silence in factory.silence_by_resource().items():
        metrics.age_of_watch(resource, silence)
    return Components(factory, queue_watch, leader, events, queues, workers)


class Manager:
    """The order in which the parts start and end, for one `run`; `told` ends when it is to end."""

    def __init__(self, parts: Components, told: Callable[[], Awaitable[None]]) -> None:
        self._factory = parts.factory
        self._queue_watch = parts.queue_watch
        self._leader = parts.leader
        self._events = parts.events
        self._queues = parts.queues
        self._workers = parts.workers
        self._told = told
        self._works = False

    async def run(self) -> None:
        """Work until told to end, then end in order. Raises NotLeader on loss of the lease."""
        lost: list[NotLeader] = []

        async def lead() -> None:
            try:
                await self._leader.run()
            except NotLeader as error:
                lost.append(error)
                background.cancel_scope.cancel()

        answered = False
        async with anyio.create_task_group() as background:
            for informer in (*self._factory.informers, *self._queue_watch.informers):
                background.start_soon(informer.run)
            background.start_soon(self._factory.nodes.follow)
            background.start_soon(self._factory.discovery.run)
            background.start_soon(self._queue_watch.run_kai)
            background.start_soon(self._queue_watch.follow)
            background.start_soon(self._factory.groups.run)
            background.start_soon(lead)
            answered = await self._write_until_told()
            background.cancel_scope.cancel()
        if lost:
            raise lost[0]
        if answered:
            await self._leader.release()
        else:
            log.warning("lease left to expire: writes without an answer may still be carried out")

    async def _write_until_told(self) -> bool:
        """Whether every write was answered, the last event's included."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._events.run)
            drained = await self._work_until_told()
            self._events.shut_down(FLUSH_SECONDS)
            tasks.cancel_scope.deadline = anyio.current_time() + 2 * FLUSH_SECONDS
        return drained and not tasks.cancel_scope.cancelled_caught

    async def _work_until_told(self) -> bool:
        """Whether every reconcile came to its end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._start_workers, tasks)
            await self._told()
            log.info("ends: no more keys are taken", drain_seconds=DRAIN_SECONDS)
            for worker in self._workers:
                worker.shut_down()
            tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS
            if not self._works:
                tasks.cancel_scope.cancel()
        return not (self._works and tasks.cancel_scope.cancelled_caught)

    async def _start_workers(self, tasks: anyio.abc.TaskGroup) -> None:
        alone = self._leader.elected.is_set()
        await self._factory.synced()
        await self._factory.discovery.looked.wait()
        await self._queue_watch.settled()
        async with anyio.create_task_group() as standby:
            standby.start_soon(self._forget_what_is_gone)
            await self._leader.elected.wait()
            standby.cancel_scope.cancel()
        if not alone:
            for informer in self._factory.memories:
                await _catch_up(informer)
        log.info("works", workers={worker.name: worker.concurrency for worker in self._workers})
        self._works = True
        for worker in self._workers:
            for _ in range(worker.concurrency):
                tasks.start_soon(worker.run)

    async def _forget_what_is_gone(self) -> None:
        """Keep a standby's queues as small as its caches: it takes no keys, and may stand by long.

        The leader forgets by reconciling the key of what is gone.
        """
        caches = self._factory.caches
        present: dict[str, Callable[[Key], bool]] = {
            "job": lambda key: caches(key[0]).jobs.get(*key) is not None,
            "queue": lambda key: caches(key[0]).queues.get(*key) is not None,
        }
        while True:
            await anyio.sleep(FORGET_SECONDS)
            for name, keep in present.items():
                if name in self._queues:
                    self._queues[name].retain(keep)


async def _catch_up(informer: Informer[Any]) -> None:
    """Wait until the cache shows what the leader before has written, or something newer.

    A watch may lag, and by up to 90 s if its connection is dead: from a past in which a job was not
    yet admitted, the same room would be promised twice. What else was written is made once by its
    name, UID or resourceVersion, however late the caches are.
    """
    while True:
        try:
            newest = await informer.newest()
            break
        except (ApiError, Disconnected) as error:
            log.warning("cannot look how late a cache is", error=str(error))
            await anyio.sleep(CATCH_UP_RETRY)
    while not await informer.wait_for(newest, CATCH_UP_WARNING):
        log.warning("waits for a cache that is late", resource=informer.kind.resource)


def _leader(
    settings: Settings, transport: Transport, metrics: Metrics, clock: Clock, identity: str
) -> Leadership:
    if not settings.leader_election:
        return NoElection()
    return Leader(
        transport,
        identity=identity,
        namespace=settings.lease_namespace,
        name=settings.lease_name,
        durations=settings.lease_durations,
        on_transition=metrics.lease_transitions.inc,
        clock=clock.monotonic,
        now=clock.wall,
        jitter=clock.jitter,
    )


def _census(
    settings: Settings, factory: InformerFactory, leader: Leadership, metrics: Metrics, clock: Clock
) -> JobMetrics:
    """What is told of jobs and queues at each scrape, fed by the factory's changes."""
    census = JobMetrics(
        metrics.queue_labels,
        leads=leader.may_write,
        now=lambda: clock.wall().timestamp(),
        nodes=lambda: factory.nodes.view,
        know=metrics.changes.know_queue,
        forget=metrics.changes.forget_queue,
    )
    each = PerJobMetrics(
        settings.metrics_jobs,
        leads=leader.may_write,
        get=lambda namespace, name: factory.caches(namespace).jobs.get(namespace, name),
    )
    factory.subscribe(jobs=census.job_changed, queues=census.queue_changed)
    if settings.metrics_jobs:
        factory.subscribe(jobs=each.job_changed, queues=lambda change, initial: None)
    metrics.register(census)
    metrics.register(each)
    return census


def _work_queue(name: str, metrics: Metrics, clock: Clock) -> AsyncWorkQueue[Any]:
    """The work queue of the controller of this name, measured."""
    observer = metrics.queue_observer(name)
    queue: AsyncWorkQueue[Any] = AsyncWorkQueue(clock.monotonic, observer=observer)
    metrics.watch_queue(name, queue)
    return queue


class _Maker(Struct, frozen=True):
    """Makes the workers; holds what all of them share."""

    settings: Settings
    applier: Applier
    events: EventRecorder
    metrics: Metrics
    clock: Clock

    def job_controller(
        self, queue: AsyncWorkQueue[Key], factory: InformerFactory
    ) -> Controller[Key]:
        concurrency, clock = self.settings.workers, self.clock.monotonic
        expectations = Expectations(factory.stores, clock)
        reconciler = JobReconciler(
            observe=factory.observe,
            decide=partial(reconcile, defaults=_defaults(self.settings)),
            applier=self.applier,
            writes=Writes(self.applier, expectations, self.metrics),
            events=self.events,
            metrics=self.metrics,
            is_busy=lambda: len(queue) > concurrency,
            clock=clock,
            now=self.clock.second,
        )
        return Controller(
            "job", queue, reconciler, self.metrics, concurrency=concurrency, clock=clock
        )

    def queue_controller(self, queue: AsyncWorkQueue[Key], watch: QueueView) -> Controller[Key]:
        expectations = Expectations(watch.stores, self.clock.monotonic)
        reconciler = QueueReconciler(
            observe=watch.observe,
            decide=partial(reconcile_queue, defaults=_defaults(self.settings)),
            applier=self.applier,
            writes=Writes(self.applier, expectations, self.metrics),
            events=self.events,
            clock=self.clock.monotonic,
            now=self.clock.second,
        )
        concurrency, clock = QUEUE_WORKERS, self.clock.monotonic
        return Controller(
            "queue", queue, reconciler, self.metrics, concurrency=concurrency, clock=clock
        )

    def admission_controller(
        self, queue: AsyncWorkQueue[str], watch: AdmissionView, census: JobMetrics
    ) -> Controller[str]:
        reconciler = AdmissionReconciler(
            watch=watch,
            decide=admit,
            applier=self.applier,
            events=self.events,
            metrics=self.metrics,
            account=census.account,
            clock=self.clock.monotonic,
            now=self.clock.second,
        )
        return Controller("admission", queue, reconciler, self.metrics, clock=self.clock.monotonic)


def _defaults(settings: Settings) -> Defaults:
    return Defaults(
        runtime_image=settings.runtime_image,
        runtime_image_pull_policy=settings.runtime_image_pull_policy,
        progress_url=settings.progress_url,
        grow_after=timedelta(seconds=settings.grow_after),
    )
