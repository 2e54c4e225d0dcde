"""The informers of the controller and their caches. `job_keys` says which change wakes which job.

There are seven informers, of all namespaces or of the one that the controller is limited to. One
more informer lists the cluster's Nodes.

The controller starts without the informers of events and Nodes, and works without the permission
to read them: events explain why a pod is missing, and Nodes show that a machine is lost.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import (
    CLAIMS,
    EVENTS,
    JOBS,
    NODES,
    PODS,
    SERVICES,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
    Kind,
    Object,
)
from torchrun_controller.cache.group_view import GroupView
from torchrun_controller.cache.informer import Informer, Observer, Unobserved, longest_silence
from torchrun_controller.cache.job_keys import (
    CHILD_KINDS,
    RULE_BY_RESOURCE,
    all_jobs,
    unfinished_jobs,
)
from torchrun_controller.cache.node_view import NodeView
from torchrun_controller.cache.observe import Caches, Child, Key, empty_caches, observe
from torchrun_controller.cache.progress_reports import ReportingWorker, Reports
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.cache.vanished_workers import VanishedWorkers
from torchrun_controller.client import Transport
from torchrun_controller.client.discovery import Discovery
from torchrun_controller.clock import SYSTEM, Clock
from torchrun_controller.reconcile.model.observed import Installed, Observed
from torchrun_controller.reconcile.pods.lifecycle import alive, index_of
from torchrun_controller.watch import CLIENT_GO, Timings, Watcher
from torchrun_controller.workqueue import INITIAL, WorkQueue

T = TypeVar("T", bound=Object)
Listener: TypeAlias = Callable[[Change[T], bool], None]
"""Called with a change, and whether it comes from a list. See `Informer`."""

# The warnings that explain why a pod is not created, a PVC not bound or a volume not mounted are
# rare. The server filters out the frequent ones.
WARNINGS = "type=Warning,reason!=FailedScheduling,reason!=BackOff,reason!=Unhealthy"
# The API server sends no bookmarks for events, so a silent watch of events is not dead.
_EVENT_TIMINGS = replace(CLIENT_GO, silence=2 * CLIENT_GO.watch + CLIENT_GO.grace)


class InformerFactory:
    """The informers and caches of the cluster. Adds keys of jobs to `queue` by `job_keys`."""

    def __init__(
        self,
        transport: Transport,
        queue: WorkQueue[Key],
        namespace: str = "",
        clock: Clock = SYSTEM,
        observer: Observer | None = None,
    ) -> None:
        self.namespace = namespace  # "": all
        self.clock = clock
        self._transport = transport
        self._queue = queue
        self._listeners: dict[str, list[Listener[Any]]] = {}  # by resource
        self.observer = observer or Unobserved()
        self.caches = empty_caches()
        self._required = self._required_informers()  # by resource
        self._warnings = self._informer(
            EVENTS, self.caches.warnings, field_selector=WARNINGS, timings=_EVENT_TIMINGS
        )
        self.nodes = NodeView(
            transport,
            self.observer,
            partial(self._handle_change, NODES),
            self._handle_nodes_known,
            clock,
        )
        self.reports = Reports(clock.monotonic)
        self.discovery = Discovery(transport)
        self.discovery.subscribe(self._handle_installed)
        self.groups = GroupView(transport, self.observer, self._handle_change, namespace, clock)
        self._listen((TORCHRUN_JOBS,), self._drop_report)
        self._vanished_workers = VanishedWorkers(clock.second)
        self._listen((PODS,), self._vanished_workers.note)

    def subscribe(
        self,
        *,
        jobs: Listener[TorchrunJob],
        queues: Listener[TorchrunQueue],
        children: Listener[Child] | None = None,
    ) -> None:
        """Call these after each change of a job, a queue, or an object with a job's label."""
        self._listen((TORCHRUN_JOBS,), jobs)
        self._listen((TORCHRUN_QUEUES,), queues)
        if children is not None:
            self._listen(CHILD_KINDS, children)

    def _listen(self, kinds: Iterable[Kind[Any]], listener: Listener[Any]) -> None:
        for kind in kinds:
            self._listeners.setdefault(kind.resource, []).append(listener)

    @property
    def informers(self) -> list[Informer[Any]]:
        """All informers; each must be run."""
        return [*self._required.values(), self._warnings, self.nodes.informer]

    @property
    def status_informers(self) -> list[Informer[Any]]:
        """The informers of jobs and queues, whose status is the only state that leaders share."""
        return [self._required[kind.resource] for kind in (TORCHRUN_JOBS, TORCHRUN_QUEUES)]

    @property
    def is_reporting_list(self) -> bool:
        """Whether listeners do not know all changes of a cache yet, after a list."""
        return any(informer.is_reporting_list for informer in self._required.values())

    async def synced(self) -> None:
        """Wait until every required cache has its first list: forever if a CRD is missing."""
        for informer in self._required.values():
            await informer.synced.wait()

    def unsynced(self) -> Iterator[str]:
        """Each required cache without a list, and why."""
        for resource, informer in self._required.items():
            if not informer.synced.is_set():
                yield f"{resource} ({informer.last_read.problem or 'waiting for the first list'})"

    def shortcoming(self) -> str:
        """Return the optional kinds that cannot be watched, and why; "" without any."""
        optional: list[Informer[Any]] = [self._warnings, *self.groups.informers]
        return "; ".join(filter(None, (informer.last_read.problem for informer in optional)))

    def observe(self, namespace: str, name: str) -> Observed | None:
        """Return the input of reconcile for one job; None if it is not cached."""
        return observe(
            self.caches,
            namespace,
            name,
            nodes=self.nodes.view,
            nodes_awaited=self.nodes.is_awaited,
            reports=self.reports,
            installed=self.discovery.installed,
            groups=self.groups.owned_by,
            vanished=self._vanished_workers.of(namespace, name),
        )

    def job_of(self, namespace: str, pod: str, uid: str) -> Key | None:
        """Return the key of the job that a running worker pod is labelled with; None without one.

        Cheap, for the unverified claims of a token: it reads labels only. See `worker`.
        """
        cached_pod = self._pod(namespace, pod, uid)
        if (
            cached_pod is None
            or cached_pod.metadata.labels.component != names.WORKER
            or not alive(cached_pod)
        ):
            return None
        return namespace, cached_pod.metadata.labels.torchrun_job

    def worker(self, namespace: str, pod: str, uid: str) -> ReportingWorker | None:
        """Return the worker of a pod; None if it is of no attempt of a job that exists."""
        cached_pod = self._pod(namespace, pod, uid)
        if cached_pod is None:
            return None
        job = cached_pod.metadata.labels.torchrun_job
        observed = self.observe(namespace, job)
        if observed is None:
            return None
        key, job_uid = (namespace, job), observed.job.metadata.uid
        is_leader = index_of(cached_pod) == 0
        if observed.gang.child_jobs and cached_pod in observed.gang.workers:
            child_uid = observed.gang.current_job.metadata.uid
            return ReportingWorker(key, child_uid, is_leader, job_uid)
        if cached_pod.metadata.labels.job_uid == job_uid:
            return ReportingWorker(key, "", is_leader, job_uid, is_current=False)
        return None

    def _pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        cached_pod = self.caches.pods.get(namespace, name)
        return (
            cached_pod
            if cached_pod is not None and uid and cached_pod.metadata.uid == uid
            else None
        )

    def stores(self, key: Key) -> Mapping[str, Store[Any]]:
        """Return the caches with the objects of a job, by resource."""
        return {resource: informer.store for resource, informer in self._required.items()}

    def idle_by_resource(self) -> dict[str, Callable[[], float]]:
        """For each required resource, the seconds since its informer last acted."""
        return {resource: informer.idle for resource, informer in self._required.items()}

    def silence_by_resource(self) -> dict[str, Callable[[], float]]:
        """For each required resource and nodes, the seconds since the last byte of its watches."""
        return {
            resource: partial(longest_silence, (informer,))
            for resource, informer in self._with_nodes().items()
        }

    def objects_by_resource(self) -> dict[str, Sized]:
        """For each required resource and nodes, its cache; `len` is the number of objects."""
        return {resource: informer.store for resource, informer in self._with_nodes().items()}

    def _with_nodes(self) -> dict[str, Informer[Any]]:
        return {**self._required, NODES.resource: self.nodes.informer}

    def _required_informers(self) -> dict[str, Informer[Any]]:
        caches = self.caches
        stores: tuple[tuple[Kind[Any], Store[Any]], ...] = (
            (TORCHRUN_JOBS, caches.jobs),
            (TORCHRUN_QUEUES, caches.queues),
            (PODS, caches.pods),
            (JOBS, caches.child_jobs),
            (CLAIMS, caches.claims),
            (SERVICES, caches.services),
        )
        return {
            kind.resource: self._informer(
                kind, store, label_selector=names.JOB_LABEL if kind in CHILD_KINDS else ""
            )
            for kind, store in stores
        }

    def _informer(
        self,
        kind: Kind[T],
        store: Store[T],
        *,
        label_selector: str = "",
        field_selector: str = "",
        timings: Timings = CLIENT_GO,
    ) -> Informer[T]:
        watcher = Watcher(
            kind,
            self.clock.jitter,
            label_selector=label_selector,
            field_selector=field_selector,
            timings=timings,
        )
        return Informer(
            watcher,
            self._transport,
            store,
            partial(self._handle_change, kind),
            namespace=self.namespace,
            observer=self.observer,
            clock=self.clock.monotonic,
        )

    def _handle_change(self, kind: Kind[Any], change: Change[Any], initial: bool) -> None:
        """Add the jobs that the rule of `kind` returns, and call the listeners."""
        obj = change.object
        priority = INITIAL if initial else 0
        if isinstance(obj, TorchrunJob) and not obj.status.phase:
            priority = 0  # after a restart, new jobs go before those that were reconciled before
        rule = RULE_BY_RESOURCE[kind.resource]
        for key in rule(self.caches, change, initial):
            self._queue.add(key, priority)
        for listener in self._listeners.get(kind.resource, ()):
            listener(change, initial)

    def _drop_report(self, change: Change[TorchrunJob], initial: bool) -> None:
        if change.new is None:
            meta = change.object.metadata
            self.reports.forget((meta.namespace, meta.name))

    def _handle_installed(self, installed: Installed) -> None:
        self.groups.follow(installed)
        self._add_initial(unfinished_jobs)

    def _handle_nodes_known(self) -> None:
        self._add_initial(all_jobs)

    def _add_initial(self, jobs: Callable[[Caches], Iterable[Key]]) -> None:
        for key in jobs(self.caches):
            self._queue.add(key, INITIAL)
