"""The view of queues: KAI's queues, and which change adds which queue's key.

It adds to the informer factory one informer of KAI's queues, which runs when their kind is
installed. The controller starts without the permission to read them; the queues that need it report
that.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import anyio

from torchrun_api.kinds.extras import KaiQueue
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import KAI_QUEUES, TORCHRUN_QUEUES
from torchrun_controller.cache.informer import Informer, Observer, longest_silence
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.observe import QUEUE_INDEX, Key, index_key
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.queue import ObservedQueue, kai
from torchrun_controller.reconcile.queue.model import NOT_SYNCED, state_of
from torchrun_controller.watch import Watcher
from torchrun_controller.workqueue import INITIAL, WorkQueue

# Seconds, on average. A count reads all jobs of a queue, so a burst of changes causes one count. It
# comes at a random time, because the writes of many queues at once would delay those of jobs.
COUNT_SECONDS = 1.0
_CHECK_SECONDS = 1.0


class QueueView:
    """The cache of KAI's queues. Adds keys of queues to the work queue `work`."""

    def __init__(
        self,
        transport: Transport,
        observer: Observer,
        factory: InformerFactory,
        work: WorkQueue[Key],
    ) -> None:
        self._factory = factory
        self._work = work
        self._kai: Informer[KaiQueue] = Informer(
            Watcher(KAI_QUEUES, factory.clock.jitter),
            transport,
            Store(),
            self._kai_changed,
            observer=observer,
            clock=factory.clock.monotonic,
        )
        self._kai_installed = anyio.Event()
        factory.subscribe(jobs=self._job_changed, queues=self._queue_changed)
        factory.discovery.subscribe(self._installed_changed)

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
        """Wait until the first list of KAI's queues has succeeded or failed, if KAI is installed.

        It fails at the latest by the timeout of its requests.
        """
        if self._kai_installed.is_set():
            await self._kai.first_result.wait()

    async def follow(self) -> NoReturn:
        """Add every queue when the reason why KAI's queues cannot be read changes."""
        previous = NOT_SYNCED
        while True:
            problem = self._kai_problem()
            if problem != previous:
                previous = problem
                self._add_all()
            await anyio.sleep(_CHECK_SECONDS)

    def observe(self, namespace: str, name: str) -> ObservedQueue | None:
        """Return the input of reconcile for one queue; None if it is not cached."""
        caches = self._factory.caches
        queue = caches.queues.get(namespace, name)
        if queue is None:
            return None
        kai_queues = self._kai
        return ObservedQueue(
            queue=queue,
            jobs=caches.jobs.by_index(QUEUE_INDEX, index_key(namespace, name)),
            installed=self._factory.discovery.installed,
            kai={q.metadata.name: q for q in kai_queues.store}
            if kai_queues.synced.is_set()
            else None,
            kai_problem=self._kai_problem(),
            kai_users=tuple(self._other_kai_users(queue)),
            namespace=self._factory.namespace,
        )

    def stores(self, key: Key) -> Mapping[str, Store[Any]]:
        """Return the caches with the objects of this queue, by resource."""
        queues = {TORCHRUN_QUEUES.resource: self._factory.caches.queues}
        kai_queues = {KAI_QUEUES.resource: self._kai.store} if self._kai.synced.is_set() else {}
        return {**queues, **kai_queues}

    def _kai_problem(self) -> str:
        """Return why KAI's queues are not known."""
        return self._kai.last_read.problem or NOT_SYNCED

    def _other_kai_users(self, queue: TorchrunQueue) -> Iterator[TorchrunQueue]:
        """The other queues that name a KAI queue."""
        for other in self._factory.caches.queues:
            if other.spec.kai_queue and other.metadata.uid != queue.metadata.uid:
                yield other

    def _queues_concerned(self, kai_queue: str) -> Iterator[TorchrunQueue]:
        """The queues that name this KAI queue, and its owner, which may name another one now."""
        present = self._kai.store.get("", kai_queue)
        owner = "" if present is None else kai.owner_of(present)
        for queue in self._factory.caches.queues:
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

    def _kai_changed(self, change: Change[KaiQueue], initial: bool) -> None:
        """Add every queue after a change of the spec: it may wait for this KAI queue."""
        if initial or _kai_state(change.old) != _kai_state(change.new):
            self._add_all()

    def _installed_changed(self, installed: Installed) -> None:
        if installed.serves(KAI_QUEUES):
            self._kai_installed.set()
        self._add_all()

    def _add_all(self) -> None:
        for queue in self._factory.caches.queues:
            self._add(queue.metadata.namespace, queue.metadata.name, initial=True)

    def _add(self, namespace: str, name: str, *, initial: bool) -> None:
        self._work.add((namespace, name), INITIAL if initial else 0)


def _counted_state(job: TorchrunJob | None) -> object:
    return None if job is None else (job.spec.job_queue, state_of(job))


def _kai_fields(queue: TorchrunQueue | None) -> object:
    if queue is None:
        return None
    return queue.spec.kai_queue, queue.metadata.deletion_timestamp is None


def _kai_state(queue: KaiQueue | None) -> object:
    return None if queue is None else (queue.metadata.annotations, queue.spec)
