"""The informers of the controller, their caches, and which change wakes which job's key.

There are seven informers for all namespaces, or seven for each namespace that the controller is
limited to. A job and all that it refers to are in one namespace, so caches are never joined. One
more informer covers the cluster's nodes.

The informers of warnings and of nodes improve reasons and reactions only. The start does not wait
for them, and the controller works without the permission to read events or nodes.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import (
    CoreEvent,
    Job,
    PersistentVolumeClaim,
    Pod,
    SchedulingGroup,
    Service,
)
from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import (
    CLAIMS,
    EVENTS,
    JOBS,
    NODES,
    PODS,
    SERVICES,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
    Object,
)
from torchrun_api.queue import TorchrunQueue
from torchrun_api.status import TERMINAL
from torchrun_controller.cache.group_view import GroupView
from torchrun_controller.cache.informer import Informer, Observer, Unobserved
from torchrun_controller.cache.node_view import NodeView
from torchrun_controller.cache.observe import (
    NODE_INDEX,
    QUEUE_INDEX,
    Caches,
    Key,
    empty_caches,
    finished_parents,
    followers,
    index_key,
    observe,
)
from torchrun_controller.cache.progress_reports import Reports, Worker
from torchrun_controller.cache.read_errors import ReadErrors
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.client.discovery import Discovery
from torchrun_controller.clock import SYSTEM, Clock
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.watch import CLIENT_GO
from torchrun_controller.workqueue import INITIAL, WorkQueue

Child: TypeAlias = Job | Pod | PersistentVolumeClaim | Service

T = TypeVar("T", bound=Object)
Listener: TypeAlias = Callable[[Change[T], bool], None]

# Warnings that explain why a pod is not created, a PVC not bound or a volume not mounted are rare.
# The server filters out the frequent ones, which are not needed.
WARNINGS = "type=Warning,reason!=FailedScheduling,reason!=BackOff,reason!=Unhealthy"
# The API server sends no bookmarks for events, so a silent watch of them is not dead.
_QUIET = replace(CLIENT_GO, silence=2 * CLIENT_GO.watch + CLIENT_GO.grace)


class Scope(Struct, frozen=True):
    """One namespace, or all of them: the caches, and the informers that fill them, by resource."""

    caches: Caches
    informers: dict[str, Informer[Any]]
    stores: dict[str, Store[Any]]
    warnings: Informer[CoreEvent]


class InformerFactory:
    """The caches of the cluster. Adds the keys of jobs that a change concerns to `queue`."""

    def __init__(
        self,
        transport: Transport,
        read_errors: ReadErrors,
        queue: WorkQueue[Key],
        namespaces: tuple[str, ...] = (),
        clock: Clock = SYSTEM,
        observer: Observer | None = None,
    ) -> None:
        self.namespaces = namespaces
        self.clock = clock
        self.read_errors = read_errors
        self._transport = transport
        self._queue = queue
        self._job_listeners: list[Listener[TorchrunJob]] = []
        self._queue_listeners: list[Listener[TorchrunQueue]] = []
        self._child_listeners: list[Listener[Child]] = []
        self.observer = observer or Unobserved()
        self._scopes = {namespace: self._scope(namespace) for namespace in namespaces or ("",)}
        self._everywhere = self._scopes.get("")
        self.nodes = NodeView(
            transport, self.observer, queue, self._with_workers_on, read_errors, clock
        )
        self.reports = Reports(clock.monotonic)
        self.discovery = Discovery(transport)
        self.discovery.subscribe(self._installed_changed)
        self.groups = GroupView(transport, self.observer, self._group_changed, namespaces, clock)

    def subscribe(
        self,
        *,
        jobs: Listener[TorchrunJob],
        queues: Listener[TorchrunQueue],
        children: Listener[Child] | None = None,
    ) -> None:
        """Call these after each change of a job, a queue or a child object, as informers do."""
        self._job_listeners.append(jobs)
        self._queue_listeners.append(queues)
        if children is not None:
            self._child_listeners.append(children)

    def caches(self, namespace: str) -> Caches:
        """Return the caches that hold this namespace."""
        return self._scope_of(namespace).caches

    def queues(self) -> Iterator[TorchrunQueue]:
        """Iterate over the queues of all namespaces."""
        for scope in self._scopes.values():
            yield from scope.caches.queues

    @property
    def informers(self) -> list[Informer[Any]]:
        """All informers; each must be run."""
        scopes = self._scopes.values()
        of_scopes = [i for scope in scopes for i in (*scope.informers.values(), scope.warnings)]
        return [*of_scopes, self.nodes.informer]

    @property
    def is_synced(self) -> bool:
        """Whether every required cache holds its first list."""
        return all(_all_synced(group) for group in self._by_resource().values())

    @property
    def memories(self) -> list[Informer[Any]]:
        """The informers of jobs and queues, whose status holds all that leaders remember."""
        kinds = (TORCHRUN_JOBS.resource, TORCHRUN_QUEUES.resource)
        return [scope.informers[kind] for scope in self._scopes.values() for kind in kinds]

    async def synced(self) -> None:
        """Wait until every required cache holds its first list: forever if a CRD is missing."""
        for group in self._by_resource().values():
            for informer in group:
                await informer.synced.wait()

    def observe(self, namespace: str, name: str) -> Observed | None:
        """Return all that is known of one job; None if it is gone."""
        caches = self._scope_of(namespace).caches
        return observe(
            caches,
            namespace,
            name,
            nodes=self.nodes.view,
            reports=self.reports,
            installed=self.discovery.installed,
            groups=partial(self.groups.owned_by, namespace),
        )

    def job_of(self, namespace: str, pod: str, uid: str) -> Key | None:
        """Return the key of the job whose worker this live pod seems to be. Cheap.

        Goes by labels: the claims of a token are to be trusted only after a TokenReview.
        """
        known = self._pod(namespace, pod, uid)
        if known is None or known.metadata.labels.component != names.WORKER or not alive(known):
            return None
        return namespace, known.metadata.labels.torchrun_job

    def worker(self, namespace: str, pod: str, uid: str) -> Worker | None:
        """Return the worker that this pod is, if it belongs to the present attempt of a job."""
        known = self._pod(namespace, pod, uid)
        if known is None:
            return None
        job = known.metadata.labels.torchrun_job
        observed = self.observe(namespace, job)
        if observed is None or not observed.gang.child_jobs or known not in observed.gang.workers:
            return None
        return Worker((namespace, job), observed.gang.current_job.metadata.uid)

    def _pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        scope = self._everywhere or self._scopes.get(namespace)
        known = scope.caches.pods.get(namespace, name) if scope else None
        return known if known is not None and uid and known.metadata.uid == uid else None

    def stores(self, key: Key) -> Mapping[str, Store[Any]]:
        """Return the caches that show the objects of this job, by resource."""
        return self._scope_of(key[0]).stores

    def synced_by_resource(self) -> dict[str, Callable[[], bool]]:
        """For each resource that is needed, whether its caches hold their first whole lists."""
        return {r: partial(_all_synced, group) for r, group in self._by_resource().items()}

    def idle_by_resource(self) -> dict[str, Callable[[], float]]:
        """For each resource that is needed, the seconds since its informers last did anything."""
        return {r: partial(_idle, group) for r, group in self._by_resource().items()}

    def silence_by_resource(self) -> dict[str, Callable[[], float]]:
        """For each resource, the seconds since its watches last delivered anything."""
        by_resource = {**self._by_resource(), NODES.resource: [self.nodes.informer]}
        return {resource: partial(_silence, group) for resource, group in by_resource.items()}

    def objects_by_resource(self) -> dict[str, Sized]:
        """For each resource, its caches, whose sizes are the numbers of objects."""
        by_resource = {**self._by_resource(), NODES.resource: [self.nodes.informer]}
        return {resource: _Objects(group) for resource, group in by_resource.items()}

    def _with_workers_on(self, node: str) -> Iterator[Key]:
        """Keys of jobs with workers on this node, by pods and by status; all jobs for ""."""
        for scope in self._scopes.values():
            pods, jobs = scope.caches.pods, scope.caches.jobs
            for pod in pods.by_index(NODE_INDEX, node) if node else pods:
                yield pod.metadata.namespace, pod.metadata.labels.torchrun_job
            for job in jobs.by_index(NODE_INDEX, node) if node else jobs:
                yield job.metadata.namespace, job.metadata.name

    def _by_resource(self) -> dict[str, list[Informer[Any]]]:
        scopes = list(self._scopes.values())
        return {r: [scope.informers[r] for scope in scopes] for r in scopes[0].informers}

    def _scope_of(self, namespace: str) -> Scope:
        return self._everywhere or self._scopes[namespace]

    def _scope(self, namespace: str) -> Scope:
        caches = empty_caches()
        own = partial(
            Informer,
            transport=self._transport,
            namespace=namespace,
            observer=self.observer,
            clock=self.clock.monotonic,
            random=self.clock.jitter,
        )
        child = partial(own, on_change=self._child_changed, label_selector=names.JOB_LABEL)
        informers: tuple[Informer[Any], ...] = (
            own(
                TORCHRUN_JOBS, store=caches.jobs, on_change=partial(self._job_changed, caches.jobs)
            ),
            own(
                TORCHRUN_QUEUES,
                store=caches.queues,
                on_change=partial(self._queue_changed, caches.jobs),
            ),
            child(PODS, store=caches.pods),
            child(JOBS, store=caches.child_jobs),
            child(CLAIMS, store=caches.claims),
            child(SERVICES, store=caches.services),
        )
        warnings = own(
            EVENTS,
            store=caches.warnings,
            on_change=partial(self._warned, caches),
            field_selector=WARNINGS,
            timings=_QUIET,
        )
        by_resource = {informer.kind.resource: informer for informer in informers}
        stores = {r: i.store for r, i in by_resource.items()}
        return Scope(caches, by_resource, stores, warnings)

    def _job_changed(
        self, jobs: Store[TorchrunJob], change: Change[TorchrunJob], initial: bool
    ) -> None:
        meta = change.object.metadata
        if change.new is None:
            self.reports.forget((meta.namespace, meta.name))
        # After a restart, a job without a phase goes before the jobs that are under way.
        has_phase = bool(change.object.status.phase)
        self._queue.add((meta.namespace, meta.name), INITIAL if initial and has_phase else 0)
        if not initial:
            for related in followers(jobs, change) | finished_parents(jobs, change):
                self._queue.add((meta.namespace, related))
        for listener in self._job_listeners:
            listener(change, initial)

    def _queue_changed(
        self, jobs: Store[TorchrunJob], change: Change[TorchrunQueue], initial: bool
    ) -> None:
        for listener in self._queue_listeners:
            listener(change, initial)
        if not initial and _template(change.old) == _template(change.new):
            return
        meta = change.object.metadata
        for job in jobs.by_index(QUEUE_INDEX, index_key(meta.namespace, meta.name)):
            if job.status.phase not in TERMINAL:
                self._queue.add((meta.namespace, job.metadata.name), INITIAL if initial else 0)

    def _installed_changed(self, installed: Installed) -> None:
        """Wake every live job: it may wait for a scheduler."""
        self.groups.follow(installed)
        for scope in self._scopes.values():
            for job in scope.caches.jobs:
                if job.status.phase not in TERMINAL:
                    self._queue.add((job.metadata.namespace, job.metadata.name), INITIAL)

    def _group_changed(self, change: Change[SchedulingGroup], initial: bool) -> None:
        """Wake the job of a group: by our label, or by the child Job that controls a Workload of
        Kueue.
        """
        meta = change.object.metadata
        job = meta.labels.torchrun_job
        owners = (owner.name for owner in meta.owner_references if owner.controller)
        for owner in owners if not job else ():
            child = self._scope_of(meta.namespace).caches.child_jobs.get(meta.namespace, owner)
            job = child.metadata.labels.torchrun_job if child else ""
        if job:
            self._queue.add((meta.namespace, job), INITIAL if initial else 0)

    def _child_changed(self, change: Change[Child], initial: bool) -> None:
        self._add_owner(change.object, initial)
        if change.old is not None and _job(change.old) != _job(change.object):
            self._add_owner(change.old, initial)  # its label has changed
        for listener in self._child_listeners:
            listener(change, initial)

    def _add_owner(self, child: Child, initial: bool) -> None:
        meta = child.metadata
        self._queue.add((meta.namespace, meta.labels.torchrun_job), INITIAL if initial else 0)

    def _warned(self, caches: Caches, change: Change[CoreEvent], initial: bool) -> None:
        """Wake the job whose object the warning regards; one not cached yet wakes it later."""
        regarding = change.object.involved_object
        stores: dict[str, Store[Any]] = {
            JOBS.kind: caches.child_jobs,
            PODS.kind: caches.pods,
            CLAIMS.kind: caches.claims,
        }
        store = stores.get(regarding.kind)
        child = store.get(regarding.namespace, regarding.name) if store is not None else None
        if child is not None:
            self._add_owner(child, initial)


def _job(child: Child) -> str:
    return child.metadata.labels.torchrun_job


def _template(queue: TorchrunQueue | None) -> object:
    """What of a queue concerns its jobs: not the status, which changes with each of them."""
    if queue is None:
        return None
    meta = queue.metadata
    return meta.uid, meta.generation, meta.deletion_timestamp, queue.invalid


class _Objects(Sized):
    def __init__(self, informers: list[Informer[Any]]) -> None:
        self._informers = informers

    def __len__(self) -> int:
        return sum(len(informer.store) for informer in self._informers)


def _silence(informers: list[Informer[Any]]) -> float:
    """Seconds since the last delivery; 0 before the first list."""
    return max((i.silence() for i in informers if i.synced.is_set()), default=0.0)


def _idle(informers: list[Informer[Any]]) -> float:
    return max(informer.idle() for informer in informers)


def _all_synced(informers: list[Informer[Any]]) -> bool:
    return all(informer.synced.is_set() for informer in informers)
