"""The parts of a controller process, and the order in which they start and end.

Start: the informers run at once, also on a standby. Controllers run when every cache is filled,
this process leads, and the caches show the writes of the previous leader. A namespace that the
controller may not read is left out until its caches are in this state, too. End: no more keys are
taken, writes in progress finish, events are flushed, the lease is released. Loss of the lease ends
all tasks at once.

Sessions, the leader and the clock are the only access to the outside world for all components.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.abc
import structlog
from msgspec import Struct

from torchrun_api.kinds.resources import KAI_QUEUES
from torchrun_controller.cache.admission_view import AdmissionView
from torchrun_controller.cache.catch_up import wait_until_current
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.cache.group_view import select_kinds
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.queue_view import QueueView
from torchrun_controller.client import ConfigError, Transport
from torchrun_controller.client.apply import Applier
from torchrun_controller.client.events import EventRecorder
from torchrun_controller.clock import Clock
from torchrun_controller.controllers.admission import AdmissionReconciler
from torchrun_controller.controllers.controller import Controller
from torchrun_controller.controllers.decision_log import reconcile_logged
from torchrun_controller.controllers.job import JobReconciler
from torchrun_controller.controllers.queue import QueueReconciler
from torchrun_controller.controllers.writes import Writes
from torchrun_controller.leader import Leadership, NotLeader
from torchrun_controller.metrics.jobs import JobMetrics
from torchrun_controller.metrics.observers import QueueObserver, WatchObserver, watch_queue
from torchrun_controller.metrics.per_job import PerJobMetrics
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.model.observed import Defaults, Installed
from torchrun_controller.reconcile.queue import reconcile_queue
from torchrun_controller.settings import Settings
from torchrun_controller.workqueue import AsyncWorkQueue

DRAIN_SECONDS = 10.0  # for running reconciles at the end
FLUSH_SECONDS = 1.0  # for waiting events at the end
QUEUE_CONCURRENCY = 2  # queues are few and change seldom
DROP_SECONDS = 60.0  # between two clean-ups of a standby's work queues

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Sessions(Struct, frozen=True):
    """Separate sessions, so that watches and writes do not delay each other."""

    watch: Transport
    write: Transport


class Components(Struct, frozen=True):
    """The components of one process. `queues` are the work queues by name of the controller."""

    factory: InformerFactory
    queue_view: QueueView
    leader: Leadership
    events: EventRecorder
    queues: dict[str, AsyncWorkQueue[Any]]
    controllers: Sequence[Controller[Any]]


def assemble(
    settings: Settings, sessions: Sessions, leader: Leadership, metrics: Metrics, clock: Clock
) -> Components:
    """Build the components; nothing runs yet."""
    queues = {name: _work_queue(name, metrics, clock) for name in ("job", "queue", "admission")}
    factory = InformerFactory(
        sessions.watch,
        queues["job"],
        settings.namespace,
        clock,
        WatchObserver(metrics),
    )
    queue_view = QueueView(sessions.watch, factory.observer, factory, queues["queue"])
    admission_view = AdmissionView(
        factory,
        queues["admission"],
        by_nodes=settings.admit_by_nodes,
        cohort_namespaces=frozenset(settings.cohort_namespaces),
        node_overhead=settings.node_overhead,
    )
    events = EventRecorder(sessions.write, leader, clock.monotonic, clock.wall)
    job_metrics = _register_job_metrics(settings, factory, leader, metrics, clock)
    build = _Builder(settings, Applier(sessions.write, leader), events, metrics, clock)
    controllers = (
        build.job_controller(queues["job"], factory),
        build.queue_controller(queues["queue"], queue_view),
        build.admission_controller(queues["admission"], admission_view, job_metrics),
    )
    lease = f"{settings.lease_namespace}/{settings.lease_name}" if settings.leader_election else ""
    metrics.watch_leadership(leader.may_write, lease, settings.namespace)
    metrics.watch_progress(factory.reports.totals)
    for resource, objects in factory.objects_by_resource().items():
        metrics.watch_store(resource, objects)
    for resource, silence in factory.silence_by_resource().items():
        metrics.watch_age(resource, silence)
    factory.discovery.subscribe(partial(_watch_optional_kinds, metrics, factory, queue_view))
    return Components(factory, queue_view, leader, events, queues, controllers)


def _watch_optional_kinds(
    metrics: Metrics, factory: InformerFactory, queue_view: QueueView, installed: Installed
) -> None:
    """Export the age of the watches of the kinds that are served now."""
    for kind in select_kinds(installed):
        metrics.watch_age(kind.resource, partial(factory.groups.silence, kind.resource))
    if installed.serves(KAI_QUEUES):
        metrics.watch_age(KAI_QUEUES.resource, queue_view.kai_silence)


class Manager:
    """Starts and ends the components in order, for one `run`, until `stop` returns."""

    def __init__(self, components: Components, stop: Callable[[], Awaitable[None]]) -> None:
        self._factory = components.factory
        self._queue_view = components.queue_view
        self._leader = components.leader
        self._events = components.events
        self._queues = components.queues
        self._controllers = components.controllers
        self._wait_for_stop = stop
        self._started = False  # the controllers
        self._has_predecessor = True

    async def run(self) -> None:
        """Run until `stop` returns, then end in order.

        Raises NotLeader on loss of the lease, and ConfigError if the CRDs are not of this
        controller.
        """
        errors: list[NotLeader | ConfigError] = []

        async def until_error(run: Callable[[], Awaitable[None]]) -> None:
            try:
                await run()
            except (NotLeader, ConfigError) as error:
                errors.append(error)
                background.cancel_scope.cancel()

        all_confirmed = False  # whether each write of this process has a response
        async with anyio.create_task_group() as background:
            for informer in self._factory.informers:
                background.start_soon(informer.run)
            self._has_predecessor = not self._leader.elected.is_set()
            background.start_soon(self._factory.nodes.follow)
            background.start_soon(until_error, self._factory.discovery.run)
            background.start_soon(self._queue_view.run_kai)
            background.start_soon(self._queue_view.follow)
            background.start_soon(self._factory.groups.run)
            background.start_soon(until_error, self._leader.run)
            all_confirmed = await self._write_until_stop()
            background.cancel_scope.cancel()
        if errors:
            raise errors[0]
        if all_confirmed:
            await self._leader.release()
        else:
            log.warning("lease left to expire: writes without an answer may still be carried out")

    async def _write_until_stop(self) -> bool:
        """Run controllers and event recorder; return whether each write has a response."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._events.run)
            drained = await self._reconcile_until_stop()
            self._events.shut_down(FLUSH_SECONDS)
            tasks.cancel_scope.deadline = anyio.current_time() + 2 * FLUSH_SECONDS
        return drained and not tasks.cancel_scope.cancelled_caught

    async def _reconcile_until_stop(self) -> bool:
        """Run the controllers; return whether every reconcile has finished."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._start_controllers, tasks)
            await self._wait_for_stop()
            log.info("stopping: no more keys are reconciled", drain_seconds=DRAIN_SECONDS)
            for controller in self._controllers:
                controller.shut_down()
            tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS
            if not self._started:
                tasks.cancel_scope.cancel()
        return not (self._started and tasks.cancel_scope.cancelled_caught)

    async def _start_controllers(self, tasks: anyio.abc.TaskGroup) -> None:
        await self._factory.discovery.first_poll.wait()
        await self._queue_view.wait_until_known()
        async with anyio.create_task_group() as standby:
            standby.start_soon(self._drop_deleted_keys)
            await self._leader.elected.wait()
            standby.cancel_scope.cancel()
        await self._factory.synced()
        if self._has_predecessor:
            for informer in self._factory.status_informers:
                await wait_until_current(informer)
        await self._factory.nodes.wait_until_known()
        log.info("controllers started", workers={c.name: c.concurrency for c in self._controllers})
        self._started = True
        for controller in self._controllers:
            for _ in range(controller.concurrency):
                tasks.start_soon(controller.run)

    async def _drop_deleted_keys(self) -> None:
        """Drop keys of deleted objects from the queues of a standby, which takes no keys.

        A leader drops such a key by reconciling it.
        """
        caches = self._factory.caches
        present: dict[str, Callable[[Key], bool]] = {
            "job": lambda key: caches.jobs.get(*key) is not None,
            "queue": lambda key: caches.queues.get(*key) is not None,
        }
        while True:
            await anyio.sleep(DROP_SECONDS)
            for name, keep in present.items():
                if name in self._queues:
                    self._queues[name].retain(keep)


def _register_job_metrics(
    settings: Settings, factory: InformerFactory, leader: Leadership, metrics: Metrics, clock: Clock
) -> JobMetrics:
    """Build the metrics of jobs and queues, and subscribe them to changes of the caches."""
    job_metrics = JobMetrics(
        metrics.queue_labels,
        leads=leader.may_write,
        now=lambda: clock.wall().timestamp(),
        monotonic=clock.monotonic,
        nodes=lambda: factory.nodes.view,
        add_queue=metrics.add_queue,
        remove_queue=metrics.remove_queue,
    )
    per_job_metrics = PerJobMetrics(
        settings.metrics_jobs,
        leads=leader.may_write,
        get=factory.caches.jobs.get,
        progress=factory.reports.newest,
    )
    factory.subscribe(jobs=job_metrics.job_changed, queues=job_metrics.queue_changed)
    if settings.metrics_jobs:
        factory.subscribe(jobs=per_job_metrics.job_changed, queues=lambda change, initial: None)
    metrics.register(job_metrics)
    metrics.register(per_job_metrics)
    return job_metrics


def _work_queue(name: str, metrics: Metrics, clock: Clock) -> AsyncWorkQueue[Any]:
    """Return the work queue of the controller of this name, with metrics."""
    observer = QueueObserver(metrics, name)
    queue: AsyncWorkQueue[Any] = AsyncWorkQueue(clock.monotonic, observer=observer)
    watch_queue(metrics, name, queue)
    return queue


class _Builder(Struct, frozen=True):
    """Builds the controllers from the components that they share."""

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
            decide=partial(reconcile_logged, defaults=_defaults(self.settings)),
            applier=self.applier,
            writes=Writes(self.applier, expectations, self.metrics, self.clock.monotonic),
            events=self.events,
            metrics=self.metrics,
            is_busy=lambda: len(queue) > concurrency,
            clock=clock,
            now=self.clock.second,
        )
        return Controller(
            "job", queue, reconciler, self.metrics, concurrency=concurrency, clock=clock
        )

    def queue_controller(self, queue: AsyncWorkQueue[Key], view: QueueView) -> Controller[Key]:
        expectations = Expectations(view.stores, self.clock.monotonic)
        reconciler = QueueReconciler(
            observe=view.observe,
            decide=partial(reconcile_queue, defaults=_defaults(self.settings)),
            applier=self.applier,
            writes=Writes(self.applier, expectations, self.metrics, self.clock.monotonic),
            events=self.events,
            clock=self.clock.monotonic,
            now=self.clock.second,
        )
        concurrency, clock = QUEUE_CONCURRENCY, self.clock.monotonic
        return Controller(
            "queue", queue, reconciler, self.metrics, concurrency=concurrency, clock=clock
        )

    def admission_controller(
        self, queue: AsyncWorkQueue[str], view: AdmissionView, job_metrics: JobMetrics
    ) -> Controller[str]:
        reconciler = AdmissionReconciler(
            view=view,
            decide=admit,
            applier=self.applier,
            events=self.events,
            metrics=self.metrics,
            account=job_metrics.set_admission,
            clock=self.clock.monotonic,
            now=self.clock.second,
        )
        return Controller("admission", queue, reconciler, self.metrics, clock=self.clock.monotonic)


def _defaults(settings: Settings) -> Defaults:
    return Defaults(
        runtime_image=settings.runtime_image,
        runtime_image_pull_policy=settings.runtime_image_pull_policy,
        etcd_endpoint=settings.etcd_endpoint,
        kai_quota_namespaces=settings.kai_quota_namespaces,
        progress_url=settings.progress_url,
        docs_url=settings.docs_url,
    )
