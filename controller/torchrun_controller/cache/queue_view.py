"""The view of queues: their objects, KAI's queues, and which change adds which queue's key.

It adds to the informer factory two informers for each namespace (ConfigMaps and PVCs that a queue
created) and one of KAI's queues, which runs when their kind is installed. The controller starts
without the permission to read them; the queues that need it report that.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import anyio
from msgspec import Struct

from torchrun_api import names
from torchrun_api.extras import ConfigMap, KaiQueue, QueueClaim
from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import CONFIG_MAPS, KAI_QUEUES, QUEUE_CLAIMS, TORCHRUN_QUEUES
from torchrun_api.meta import find_controller
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.cache.informer import Informer, Observer, longest_silence
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.observe import QUEUE_INDEX, Key, index_key
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.queue import ObservedQueue, jobs, kai
from torchrun_controller.reconcile.queue.model import Extra
from torchrun_controller.workqueue import INITIAL, WorkQueue

OWNER_INDEX = "owner"
# Seconds, on average. A count reads all jobs of a queue, so a burst of changes causes one count. It
# comes at a random time, because the writes of many queues at once would delay those of jobs.
COUNT_SECONDS = 1.0
_CHECK_SECONDS = 1.0


class _Scope(Struct, frozen=True):
    """The informers of one namespace, or of all namespaces."""

    config_maps: Informer[ConfigMap]
    claims: Informer[QueueClaim]

    @property
    def informers(self) -> tuple[Informer[Any], ...]:
        return self.config_maps, self.claims


def by_owner(extra: Extra) -> tuple[str, ...]:
    """Index a queue's objects by the UID of the queue."""
    owner = find_controller(extra.metadata.owner_references)
    return (owner.uid,) if owner is not None else ()


class QueueView:
    """The caches of queues and their objects. Adds keys of queues to the work queue `work`."""

    def __init__(
        self,
        transport: Transport,
        observer: Observer,
        factory: InformerFactory,
        work: WorkQueue[Key],
    ) -> None:
        self._factory = factory
        self._work = work
        self._scopes = {
            namespace: self._scope(namespace, transport, observer)
            for namespace in factory.namespaces or ("",)
        }
        self._kai: Informer[KaiQueue] = Informer(
            KAI_QUEUES,
            transport,
            Store(),
            self._kai_changed,
            observer=observer,
            clock=factory.clock.monotonic,
            random=factory.clock.jitter,
        )
        self._kai_installed = anyio.Event()
        factory.subscribe(jobs=self._job_changed, queues=self._queue_changed)
        factory.scopes.subscribe(lambda scope: self._add_all())
        factory.discovery.subscribe(self._installed_changed)

    @property
    def informers(self) -> list[Informer[Any]]:
        """The informers that run from the start."""
        return [informer for scope in self._scopes.values() for informer in scope.informers]

    def config_maps_silence(self) -> float:
        """Return the seconds since the watches of ConfigMaps last delivered a byte."""
        return longest_silence(scope.config_maps for scope in self._scopes.values())

    def kai_silence(self) -> float:
        """Return the seconds since the watch of KAI's queues delivered a byte; 0 without KAI."""
        installed = self._factory.discovery.installed
        is_served = installed is not None and installed.serves(KAI_QUEUES)
        return longest_silence((self._kai,)) if is_served else 0.0

    async def run_kai(self) -> None:
        """Run the informer of KAI's queues once their kind is installed."""
        await self._kai_installed.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._add_all_after_first_list)
            await self._kai.run()

    async def _add_all_after_first_list(self) -> None:
        """Add every queue: an empty list causes no change, but shows that no KAI queue exists."""
        await self._kai.synced.wait()
        self._add_all()

    async def wait_until_known(self) -> None:
        """Wait until the first list of each cache has succeeded or failed.

        It fails at the latest by the timeout of its requests.
        """
        for informer in (*self.informers, *self._kai_if_installed()):
            await informer.first_result.wait()

    async def follow(self) -> NoReturn:
        """Add every queue when a cache is filled, or the reason of a failure changes."""
        previous: object = None
        while True:
            unseen = {name: self._explain_unsynced(scope) for name, scope in self._scopes.items()}
            if unseen != previous:
                previous = unseen
                self._add_all()
            await anyio.sleep(_CHECK_SECONDS)

    def observe(self, namespace: str, name: str) -> ObservedQueue | None:
        """Return the input of reconcile for one queue; None if it is not cached, or left out."""
        if namespace in self._factory.scopes.left_out:
            return None
        caches = self._factory.caches(namespace)
        queue = caches.queues.get(namespace, name)
        if queue is None:
            return None
        scope = self._scope_of(namespace)
        kai_queues = self._kai
        return ObservedQueue(
            queue=queue,
            jobs=caches.jobs.by_index(QUEUE_INDEX, index_key(namespace, name)),
            extras=_extras(scope, queue.metadata.uid),
            installed=self._factory.discovery.installed,
            kai={q.metadata.name: q for q in kai_queues.store}
            if kai_queues.synced.is_set()
            else None,
            unseen=self._explain_unsynced(scope),
            kai_users=tuple(self._other_kai_users(queue)),
            namespaces=tuple(
                name
                for name in self._factory.namespaces
                if name not in self._factory.scopes.left_out
            ),
        )

    def stores(self, key: Key) -> Mapping[str, Store[Any]]:
        """Return the caches with the objects of this queue, by resource."""
        informers = [i for i in (*self._scope_of(key[0]).informers, self._kai) if i.synced.is_set()]
        return {
            TORCHRUN_QUEUES.resource: self._factory.caches(key[0]).queues,
            **{informer.kind.resource: informer.store for informer in informers},
        }

    def _scope(self, namespace: str, transport: Transport, observer: Observer) -> _Scope:
        informer = partial(
            Informer,
            transport=transport,
            on_change=self._extra_changed,
            label_selector=names.QUEUE_LABEL,
            namespace=namespace,
            observer=observer,
            clock=self._factory.clock.monotonic,
            random=self._factory.clock.jitter,
        )
        index = {OWNER_INDEX: by_owner}
        return _Scope(
            informer(CONFIG_MAPS, store=Store(index)), informer(QUEUE_CLAIMS, store=Store(index))
        )

    def _scope_of(self, namespace: str) -> _Scope:
        return self._scopes.get("") or self._scopes[namespace]

    def _explain_unsynced(self, scope: _Scope) -> dict[str, str]:
        """Return the reason for each resource whose cache has no list yet."""
        needed = [*scope.informers, *self._kai_if_installed()]
        return {
            informer.kind.resource: informer.last_read.problem or "the cache is not synced yet"
            for informer in needed
            if not informer.synced.is_set()
        }

    def _kai_if_installed(self) -> list[Informer[KaiQueue]]:
        return [self._kai] if self._kai_installed.is_set() else []

    def _other_kai_users(self, queue: TorchrunQueue) -> Iterator[TorchrunQueue]:
        """The other queues that name a KAI queue."""
        for other in self._factory.queues():
            if other.spec.kai_queue and other.metadata.uid != queue.metadata.uid:
                yield other

    def _queues_concerned(self, kai_queue: str) -> Iterator[TorchrunQueue]:
        """The queues that name this KAI queue, and its owner, which may name another one now."""
        present = self._kai.store.get("", kai_queue)
        owner = "" if present is None else kai.owner_of(present)
        for queue in self._factory.queues():
            if queue.spec.kai_queue == kai_queue or (owner and kai.identity_of(queue) == owner):
                yield queue

    def _job_changed(self, change: Change[TorchrunJob], initial: bool) -> None:
        """Add each queue whose counts may change, after about COUNT_SECONDS."""
        if not initial and _counted_state(change.old) == _counted_state(change.new):
            return
        sides = (job for job in (change.old, change.new) if job is not None)
        for key in sorted({(job.metadata.namespace, job.spec.job_queue) for job in sides}):
            delay = COUNT_SECONDS * (0.5 + self._factory.clock.jitter())
            self._work.add_after(key, delay)

    def _queue_changed(self, change: Change[TorchrunQueue], initial: bool) -> None:
        """Add the queue and those that its change of KAI queues concerns."""
        meta = change.object.metadata
        self._add(meta.namespace, meta.name, initial=initial)
        if initial or _kai_fields(change.old) != _kai_fields(change.new):
            for queue in (change.old, change.new):
                name = None if queue is None else queue.spec.kai_queue
                for other in self._queues_concerned(name) if name else ():
                    self._add(other.metadata.namespace, other.metadata.name, initial=initial)

    def _extra_changed(self, change: Change[Any], initial: bool) -> None:
        """Add the queue that owns the object, and the one that owned it before."""
        namespace = change.object.metadata.namespace
        for extra in (change.old, change.new):
            owner = find_controller(extra.metadata.owner_references) if extra is not None else None
            if owner is not None:
                self._add(namespace, owner.name, initial=initial)

    def _kai_changed(self, change: Change[KaiQueue], initial: bool) -> None:
        """Add every queue after a change of the spec: it may wait for this KAI queue."""
        if initial or _kai_state(change.old) != _kai_state(change.new):
            self._add_all()

    def _installed_changed(self, installed: Installed) -> None:
        if installed.serves(KAI_QUEUES):
            self._kai_installed.set()
        self._add_all()

    def _add_all(self) -> None:
        for queue in self._factory.queues():
            self._add(queue.metadata.namespace, queue.metadata.name, initial=True)

    def _add(self, namespace: str, name: str, *, initial: bool) -> None:
        self._work.add((namespace, name), INITIAL if initial else 0)


def _extras(scope: _Scope, uid: str) -> tuple[Extra, ...] | None:
    if not all(informer.synced.is_set() for informer in scope.informers):
        return None
    return (
        *scope.config_maps.store.by_index(OWNER_INDEX, uid),
        *scope.claims.store.by_index(OWNER_INDEX, uid),
    )


def _counted_state(job: TorchrunJob | None) -> object:
    return None if job is None else (job.spec.job_queue, jobs.state_of(job))


def _kai_fields(queue: TorchrunQueue | None) -> object:
    if queue is None:
        return None
    return queue.spec.kai_queue, queue.metadata.deletion_timestamp is None


def _kai_state(queue: KaiQueue | None) -> object:
    return None if queue is None else (queue.metadata.annotations, queue.spec)
