"""The view of admission: all jobs that use or wait for quota, the queues, and the machines.

Admission has a single key. The classification of each job is cached and recomputed only when the
job, its children or its queue changes. While no queue needs admission and no job or queue has an
admission status, no change adds the key.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import TypeVar

from msgspec import Struct

from torchrun_api import names
from torchrun_api.kinds.core import Job, Node, Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import UserObject
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.observe import (
    JOB_INDEX,
    NODE_INDEX,
    QUEUE_INDEX,
    Child,
    Key,
    index_key,
)
from torchrun_controller.cache.store import Change
from torchrun_controller.reconcile.admission import nodes as node_rules
from torchrun_controller.reconcile.admission.classify import classify_job
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob, cluster_state
from torchrun_controller.reconcile.admission.model import ClusterState, Workload
from torchrun_controller.reconcile.admission.orphans import is_foreign, orphaned_workloads
from torchrun_controller.reconcile.admission.statuses import JobAdmission, job_admission
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of, uses_room
from torchrun_controller.reconcile.pods.nodes import find_lost_nodes
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.workqueue import WorkQueue

T = TypeVar("T")

ADMISSION = "all queues"  # the only key
COALESCE = 0.02  # seconds: changes within this time cause one decision


class ObservedAdmission(Struct, frozen=True, kw_only=True):
    """The input of one admission decision, and the jobs and queues that it may write to.

    `next_lost_node` is in seconds: then another machine counts as lost.
    """

    state: ClusterState
    entries: tuple[ClassifiedJob, ...]
    queues: tuple[TorchrunQueue, ...]
    next_lost_node: float | None = None


class AdmissionView:
    """Adds the key of admission to its work queue.

    Without `by_nodes`, machines are ignored, because a cluster autoscaler adds them for pending
    pods. Queues of `cohort_namespaces` may share a cohort; each other namespace has its own
    cohorts. `node_overhead` is the amount of each resource that other pods use on each machine.
    """

    def __init__(
        self,
        factory: InformerFactory,
        work: WorkQueue[str],
        *,
        by_nodes: bool = True,
        cohort_namespaces: frozenset[str] = frozenset(),
        node_overhead: Mapping[str, int] = node_rules.NO_OVERHEAD,
    ) -> None:
        self._factory = factory
        self._by_nodes = by_nodes
        self._cohort_namespaces = cohort_namespaces
        self._node_overhead = node_overhead
        self._work = work
        # By the key of the job. Bounded by the objects in the caches.
        self._entries: dict[Key, ClassifiedJob] = {}
        self._stale: set[Key] = set()
        self._jobs_with_status: set[Key] = set()
        # The queues that take part, and those whose status still has an admission to remove.
        self._admission_queues: set[Key] = set()
        # The running gangs of deleted jobs, by the key of the job.
        self._orphans: dict[Key, tuple[Workload, ...]] = {}
        self._lost_nodes: frozenset[str] = frozenset()
        factory.subscribe(
            jobs=self._job_changed, queues=self._queue_changed, children=self._child_changed
        )
        factory.nodes.subscribe(self._node_changed)

    def observe(self, now: datetime) -> ObservedAdmission | None:
        """Return the input of a decision; None while machines are needed and unknown.

        Also None until all changes of a list are reported: the caches confirm the admissions that
        they show, and the classification of a job may be older.

        Without the permission to read Nodes, quota alone decides. Other failures are temporary, and
        no decision is made until machines are known.
        """
        if self._factory.is_reporting_list or (self._by_nodes and self._factory.nodes.is_awaited):
            return None
        view = self._factory.nodes.view
        nodes = None if view is None else tuple(view)
        lost_nodes, next_lost_node = find_lost_nodes(nodes or (), now)
        if lost_nodes != self._lost_nodes:
            self._mark_pods_on(lost_nodes ^ self._lost_nodes)
            self._lost_nodes = lost_nodes
            self._stale.update(self._entries, self._orphans)
        for key in self._stale:
            self._classify(key)
        self._stale.clear()
        queues, entries = tuple(self._factory.caches.queues), tuple(self._entries.values())
        return ObservedAdmission(
            state=cluster_state(
                queues,
                entries,
                [request for requests in self._orphans.values() for request in requests],
                nodes if self._by_nodes else None,
                now,
                self._cohort_namespaces,
                self._node_overhead,
            ),
            entries=entries,
            queues=queues,
            next_lost_node=next_lost_node,
        )

    def version(self, owner: UserObject) -> str | None:
        """Return the cached resourceVersion of a job or queue; None if it is gone or replaced."""
        meta = owner.metadata
        caches = self._factory.caches
        store = caches.jobs if isinstance(owner, TorchrunJob) else caches.queues
        cached = store.get(meta.namespace, meta.name)
        if cached is None or cached.metadata.uid != meta.uid:
            return None
        return cached.metadata.resource_version

    def _classify(self, key: Key) -> None:
        caches = self._factory.caches
        job = caches.jobs.get(*key)
        uid = "" if job is None else job.metadata.uid
        # The Job of a head comes last in its gang: it has the number of nodes.
        child_jobs = caches.child_jobs.by_index(JOB_INDEX, index_key(*key))
        children = tuple(sorted(child_jobs, key=_by_attempt))
        pods = caches.pods.by_index(JOB_INDEX, index_key(*key))
        orphans = orphaned_workloads(uid, children, pods, self._lost_nodes)
        _set_or_remove(self._orphans, key, orphans or None)
        if job is None:
            self._entries.pop(key, None)
            return
        children = tuple(child for child in children if child.metadata.controlled_by(uid))
        pods = tuple(pod for pod in pods if not is_foreign(uid, pod.metadata))
        queue = caches.queues.get(key[0], job.spec.job_queue)
        classification = classify_job(job, queue, children, pods, self._lost_nodes)
        is_irrelevant = (
            classification.workload is None
            and not classification.requeued
            and key not in self._jobs_with_status
        )
        _set_or_remove(
            self._entries, key, None if is_irrelevant else ClassifiedJob(job, classification)
        )

    def _job_changed(self, change: Change[TorchrunJob], initial: bool) -> None:
        job = change.object
        key = job.metadata.namespace, job.metadata.name
        # A status is written to the newest version, so every change is relevant for the entry.
        self._mark_stale(key)
        if change.new is None:
            self._jobs_with_status.discard(key)
        elif job_admission(job) != JobAdmission():
            self._jobs_with_status.add(key)
        else:
            self._jobs_with_status.discard(key)
        if initial or _admission_fields(change.old) != _admission_fields(change.new):
            self._wake()

    def _child_changed(self, change: Change[Child], initial: bool) -> None:
        has_moved = _job_name(change.old) != _job_name(change.new)
        if not (
            has_moved
            or isinstance(change.object, Job)
            or _placement(change.old) != _placement(change.new)
        ):
            return
        for child in (change.old, change.new):
            if child is not None:
                self._reclassify((child.metadata.namespace, _job_name(child)))

    def _queue_changed(self, change: Change[TorchrunQueue], initial: bool) -> None:
        """Add the key after a change of the spec, but not of the status."""
        meta, queue = change.object.metadata, change.new
        key = meta.namespace, meta.name
        if queue is not None and (
            admission_status.takes_part(queue.spec) or queue.status.admission is not None
        ):
            self._admission_queues.add(key)
        else:
            self._admission_queues.discard(key)
        if not initial and _spec_version(change.old) == _spec_version(change.new):
            return
        jobs = self._factory.caches.jobs
        for job in jobs.by_index(QUEUE_INDEX, index_key(*key)):
            self._stale.add((meta.namespace, job.metadata.name))
        self._wake()

    def _node_changed(self, change: Change[Node] | None) -> None:
        if change is None or node_rules.relevant_fields(change.old) != node_rules.relevant_fields(
            change.new
        ):
            self._wake()

    def _mark_pods_on(self, nodes: frozenset[str]) -> None:
        """Mark the jobs of the pods on these machines: one without an entry may get it back."""
        for node in nodes:
            for pod in self._factory.caches.pods.by_index(NODE_INDEX, node):
                self._mark_stale((pod.metadata.namespace, _job_name(pod)))

    def _reclassify(self, key: Key) -> None:
        self._mark_stale(key)
        self._wake()

    def _mark_stale(self, key: Key) -> None:
        """Mark the job for a new classification, or drop it if no object of it exists."""
        if self._exists(key):
            self._stale.add(key)
            return
        self._stale.discard(key)
        self._entries.pop(key, None)
        self._orphans.pop(key, None)

    def _exists(self, key: Key) -> bool:
        """Whether the job exists, or a pod that uses quota of a job of this name."""
        caches, index = self._factory.caches, index_key(*key)
        if caches.jobs.get(*key) is not None:
            return True
        return any(map(uses_room, caches.pods.by_index(JOB_INDEX, index)))

    def _wake(self) -> None:
        if self._admission_queues or self._jobs_with_status:
            self._work.add_after(ADMISSION, COALESCE)


def _set_or_remove(entries: dict[Key, T], key: Key, value: T | None) -> None:
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


def _by_attempt(child: Job) -> tuple[int, bool]:
    return attempt_of(child), child.metadata.labels.role == names.HEAD


def _admission_fields(job: TorchrunJob | None) -> object:
    """Return the fields of a job that admission reads."""
    if job is None:
        return None
    meta, status = job.metadata, job.status
    return (
        meta.uid,
        meta.generation,
        meta.deletion_timestamp,
        status.phase,
        admission_status.request(job),
        status.observed_generation,
        status.running_seconds,
        job_admission(job),
    )


def _job_name(child: Child | None) -> str:
    """Return the name of the job in a child's label."""
    return child.metadata.labels.torchrun_job if child is not None else ""


def _placement(child: Child | None) -> object:
    """Return whether a worker runs and its machine; None for other objects."""
    if not isinstance(child, Pod) or not uses_room(child):
        return None
    return alive(child), child.spec.node_name


def _spec_version(queue: TorchrunQueue | None) -> object:
    if queue is None:
        return None
    meta = queue.metadata
    return meta.uid, meta.generation, meta.deletion_timestamp, queue.invalid
