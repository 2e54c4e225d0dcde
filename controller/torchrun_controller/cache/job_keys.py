"""Which change wakes which job: from a changed object to the keys of jobs in the work queue.

`RULES` is the table; `informer_factory` applies it to each change. `queue_view` and
`admission_view` have the keys of queues and of admission.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torchrun_api.kinds.core import CoreEvent, Node, SchedulingGroup
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
)
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.cache.node_view import node_facts
from torchrun_controller.cache.observe import (
    NODE_INDEX,
    PARENT_INDEX,
    QUEUE_INDEX,
    Caches,
    Child,
    Key,
    index_key,
)
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.reconcile.schedulers.table import GROUP_KINDS

Rule: TypeAlias = Callable[[Caches, Change[Any], bool], Iterable[Key]]
"""Returns the keys of the jobs that a change concerns; the last argument is True for a list.

This is the MapFunc of controller-runtime's event handlers.
"""


def jobs_of_job(caches: Caches, change: Change[TorchrunJob], initial: bool) -> Iterator[Key]:
    """The job itself, the jobs that depend on it (PARENT_INDEX), and its finished parents."""
    meta = change.object.metadata
    yield meta.namespace, meta.name
    if initial:
        return
    related_names = affected_dependents(caches.jobs, change) | finished_parents(caches.jobs, change)
    yield from ((meta.namespace, name) for name in related_names)


def jobs_of_queue(caches: Caches, change: Change[TorchrunQueue], initial: bool) -> Iterator[Key]:
    """The unfinished jobs of the queue (QUEUE_INDEX), unless only its status has changed."""
    if not initial and _spec_version(change.old) == _spec_version(change.new):
        return
    meta = change.object.metadata
    for job in caches.jobs.by_index(QUEUE_INDEX, index_key(meta.namespace, meta.name)):
        if job.status.phase not in TERMINAL:
            yield meta.namespace, job.metadata.name


def jobs_of_child(caches: Caches, change: Change[Child], initial: bool) -> Iterator[Key]:
    """The job that the object's label names, and the one that it named before."""
    for child in (change.object, change.old):
        if child is not None:
            yield child.metadata.namespace, child.metadata.labels.torchrun_job


def jobs_of_group(caches: Caches, change: Change[SchedulingGroup], initial: bool) -> Iterator[Key]:
    """The job of the group, and the one that it belonged to before."""
    jobs = (_job_of_group(caches, g) for g in (change.object, change.old) if g is not None)
    yield from ((change.object.metadata.namespace, job) for job in jobs if job)


def _job_of_group(caches: Caches, group: SchedulingGroup) -> str:
    """Return the job that the label names, or that of the child Job that controls the group."""
    meta = group.metadata
    job = meta.labels.torchrun_job
    for owner in meta.owner_references if not job else ():
        child = caches.child_jobs.get(meta.namespace, owner.name) if owner.controller else None
        job = child.metadata.labels.torchrun_job if child is not None else job
    return job


def jobs_of_warning(caches: Caches, change: Change[CoreEvent], initial: bool) -> Iterator[Key]:
    """The job of the object that the event regards, if that object is cached."""
    regarding = change.object.involved_object
    stores: dict[str, Store[Any]] = {
        JOBS.kind: caches.child_jobs,
        PODS.kind: caches.pods,
        CLAIMS.kind: caches.claims,
    }
    store = stores.get(regarding.kind)
    child = store.get(regarding.namespace, regarding.name) if store is not None else None
    if child is not None:
        yield child.metadata.namespace, child.metadata.labels.torchrun_job


def jobs_of_node(caches: Caches, change: Change[Node], initial: bool) -> Iterator[Key]:
    """The jobs of a machine that is lost or back, by their pods and by status (NODE_INDEX)."""
    if node_facts(change.old) == node_facts(change.new):
        return
    node = change.object.metadata.name
    for pod in caches.pods.by_index(NODE_INDEX, node):
        yield pod.metadata.namespace, pod.metadata.labels.torchrun_job
    for job in caches.jobs.by_index(NODE_INDEX, node):
        yield job.metadata.namespace, job.metadata.name


CHILD_KINDS: tuple[Kind[Any], ...] = (PODS, JOBS, CLAIMS, SERVICES)

# After a change of an object of these kinds, the rule returns the jobs for the work queue of jobs.
RULES: tuple[tuple[tuple[Kind[Any], ...], Rule], ...] = (
    ((TORCHRUN_JOBS,), jobs_of_job),
    ((TORCHRUN_QUEUES,), jobs_of_queue),
    (CHILD_KINDS, jobs_of_child),
    (GROUP_KINDS, jobs_of_group),
    ((EVENTS,), jobs_of_warning),
    ((NODES,), jobs_of_node),
)
RULE_BY_RESOURCE = {kind.resource: rule for kinds, rule in RULES for kind in kinds}


def unfinished_jobs(caches: Caches) -> Iterator[Key]:
    """The jobs to add after a change of the installed schedulers: they may wait for one."""
    for job in caches.jobs:
        if job.status.phase not in TERMINAL:
            yield job.metadata.namespace, job.metadata.name


def all_jobs(caches: Caches) -> Iterator[Key]:
    """The jobs to add when machines become known: each job, and the job of each pod."""
    for pod in caches.pods:
        yield pod.metadata.namespace, pod.metadata.labels.torchrun_job
    for job in caches.jobs:
        yield job.metadata.namespace, job.metadata.name


def affected_dependents(jobs: Store[TorchrunJob], change: Change[TorchrunJob]) -> set[str]:
    """Return the names of the jobs that a change of their parent may affect.

    A cycle that an edit closes or opens changes the status of one of its jobs after the other.
    """
    if _dependency_state(change.old) == _dependency_state(change.new):
        return set()
    meta = change.object.metadata
    dependents = jobs.by_index(PARENT_INDEX, index_key(meta.namespace, meta.name))
    return {job.metadata.name for job in dependents}


def finished_parents(jobs: Store[TorchrunJob], change: Change[TorchrunJob]) -> set[str]:
    """Return the names of the finished jobs whose deletion may wait for this change."""
    if change.old is None or (
        change.new is not None and _dependent_state(change.old) == _dependent_state(change.new)
    ):
        return set()
    namespace = change.object.metadata.namespace
    parents = (jobs.get(namespace, dependency.name) for dependency in change.old.spec.depends_on)
    return {
        parent.metadata.name
        for parent in parents
        if parent is not None and parent.status.phase in TERMINAL
    }


def _dependent_state(job: TorchrunJob) -> tuple[object, ...]:
    """Return the fields of a dependent that its finished parents wait for."""
    status = job.status
    is_finished = job.metadata.terminating or status.phase in TERMINAL
    return (is_finished, status.workers, status.dependencies_met, job.spec.depends_on)


def _dependency_state(job: TorchrunJob | None) -> tuple[object, ...]:
    """Return the fields of a parent that its dependents wait for."""
    if job is None:
        return ()
    status = job.status
    return status.phase, status.reason, status.start_time, job.spec.depends_on


def _spec_version(queue: TorchrunQueue | None) -> object:
    """Return a value that changes with the spec of a queue, but not with its status."""
    if queue is None:
        return None
    meta = queue.metadata
    return meta.uid, meta.generation, meta.deletion_timestamp, queue.invalid
