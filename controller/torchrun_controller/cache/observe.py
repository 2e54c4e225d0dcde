"""From the caches to what reconcile may look at."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from operator import attrgetter
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from torchrun_api import names
from torchrun_api.core import CoreEvent, Job, Node, PersistentVolumeClaim, Pod, Service
from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import CLAIMS, JOBS, PODS, SERVICES, Kind
from torchrun_api.meta import ChildMeta
from torchrun_api.queue import TorchrunQueue
from torchrun_api.status import TERMINAL
from torchrun_controller.cache.progress_reports import Reports
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.observed import (
    Base,
    Conflict,
    Group,
    Observed,
    ObservedCluster,
    ObservedGang,
    ObservedWorkspace,
    RefusedWrites,
    Rejection,
)
from torchrun_controller.reconcile.pods.lifecycle import alive, collected

Key: TypeAlias = tuple[str, str]
"""Namespace and name of a job or a queue: what the work queues hold."""

# Children by the job whose name their label bears; jobs by the queue that they name.
JOB_INDEX = "torchrun-job"
QUEUE_INDEX = "queue"
# Jobs by those that they depend on.
PARENT_INDEX = "parent"
# Pods by the node that they are bound to, jobs by those of their unfenced workers.
NODE_INDEX = "node"
# Bytes that were promised to local checkpoints, summed up by node.
PROMISED = "promised"
# Warnings by the UID of what they regard.
REGARDING_INDEX = "regarding"

_LONG_AGO = datetime.min.replace(tzinfo=UTC)

Child = Job | Pod | PersistentVolumeClaim | Service
C = TypeVar("C", bound=Child)


def index_key(namespace: str, name: str) -> str:
    """The value of both indexes: a name within its namespace."""
    return f"{namespace}/{name}"


def by_job(child: Child) -> Iterable[str]:
    """Indexer of the children."""
    meta = child.metadata
    return (index_key(meta.namespace, meta.labels.torchrun_job),)


def by_node(pod: Pod) -> Iterable[str]:
    """Indexer of the pods that are missed when their node is lost."""
    missed = pod.metadata.labels.component in (names.WORKER, names.SYNC)
    bound = pod.spec.node_name and missed
    return (pod.spec.node_name,) if bound else ()


def promise_of(pod: Pod) -> tuple[str, int] | None:
    """Tally of the bytes that a living pod was promised for checkpoints on its node."""
    size = names.number_in(pod.metadata.annotations.local_checkpoints)
    return (pod.spec.node_name, size) if size and pod.spec.node_name and alive(pod) else None


def by_unfenced(job: TorchrunJob) -> Iterable[str]:
    """Indexer of the jobs that wait for word of nodes; their pods there may be gone."""
    return {worker.node for worker in job.status.unfenced}


def by_queue(job: TorchrunJob) -> Iterable[str]:
    """Indexer of the jobs."""
    return (index_key(job.metadata.namespace, job.spec.job_queue),)


def by_parent(job: TorchrunJob) -> Iterable[str]:
    """Indexer of the jobs that follow others."""
    return {index_key(job.metadata.namespace, parent.name) for parent in job.spec.depends_on}


def by_regarding(event: CoreEvent) -> Iterable[str]:
    """Indexer of the warnings."""
    return (event.involved_object.uid,)


class Caches(Struct, frozen=True, kw_only=True):
    """The stores that the informers keep, one for each kind."""

    jobs: Store[TorchrunJob]
    queues: Store[TorchrunQueue]
    pods: Store[Pod]
    child_jobs: Store[Job]
    claims: Store[PersistentVolumeClaim]
    services: Store[Service]
    warnings: Store[CoreEvent]


def empty_caches() -> Caches:
    """Stores with every index that `observe` and the wake-up rules read."""
    return Caches(
        jobs=Store({QUEUE_INDEX: by_queue, PARENT_INDEX: by_parent, NODE_INDEX: by_unfenced}),
        queues=Store(),
        pods=Store({JOB_INDEX: by_job, NODE_INDEX: by_node}, {PROMISED: promise_of}),
        child_jobs=Store({JOB_INDEX: by_job}),
        claims=Store({JOB_INDEX: by_job}),
        services=Store({JOB_INDEX: by_job}),
        warnings=Store({REGARDING_INDEX: by_regarding}),
    )


def observe(
    caches: Caches,
    namespace: str,
    name: str,
    *,
    nodes: Store[Node] | None = None,
    conflicts: tuple[Conflict, ...] = (),
    rejections: tuple[Rejection, ...] = (),
    reports: Reports | None = None,
    installed: Installed | None = None,
    groups: Callable[[str], tuple[Group, ...]] = lambda owner: (),
) -> Observed | None:
    """All that is known of one job; None where it is gone. Without `nodes`, nothing of nodes.

    `groups` gives those that the object with this UID controls.
    """
    job = caches.jobs.get(namespace, name)
    if job is None:
        return None
    key, uid = index_key(namespace, name), job.metadata.uid

    def owned(meta: ChildMeta) -> bool:
        return meta.controlled_by(uid) or meta.labels.retained_from == name

    jobs, other_jobs = _part(caches.child_jobs.by_index(JOB_INDEX, key), owned)
    jobs.sort(key=lambda child: names.number_in(child.metadata.labels.attempt))
    of_workers, attempts = _part(jobs, lambda meta: meta.labels.role == names.WORKER)
    latest = attempts[-1].metadata.uid if attempts else ""
    pods = _pods(name, caches.pods.by_index(JOB_INDEX, key), _gang_of(attempts, of_workers), owned)
    claims, other_claims = _part(caches.claims.by_index(JOB_INDEX, key), owned)
    services, other_services = _part(caches.services.by_index(JOB_INDEX, key), owned)
    found = (
        *conflicts,
        *(_conflict(JOBS, other) for other in other_jobs),
        *(_conflict(PODS, other) for other in pods.others),
        *(_conflict(CLAIMS, other) for other in other_claims),
        *(_conflict(SERVICES, other) for other in other_services),
    )
    told_of: tuple[Child, ...] = (
        *claims,
        *attempts[-1:],
        *of_workers,
        *pods.workers,
        *pods.syncing,
    )
    mattering = _nodes_of(job, [*pods.workers, *pods.of_old_gangs, *pods.syncing])
    queue = caches.queues.get(namespace, job.spec.job_queue)
    roomy = {node.metadata.name for node in nodes or ()} if _stays_on_nodes(job, queue) else set()
    return Observed(
        job=job,
        queue=queue,
        parents=_parents(caches.jobs, job),
        dependents=caches.jobs.by_index(PARENT_INDEX, key),
        gang=ObservedGang(
            child_jobs=tuple(attempts),
            worker_jobs=tuple(of_workers),
            workers=tuple(sorted(pods.workers, key=attrgetter("metadata.name"))),
            stale_pods=tuple(pod for pod in pods.of_old_gangs if alive(pod) or collected(pod)),
            probes=tuple(pods.probes),
            groups=(*groups(uid), *(groups(latest) if latest else ())),
            service=next(iter(services), None),
            progress=reports.of((namespace, name), latest) if reports is not None else None,
        ),
        workspace=ObservedWorkspace(
            claims=tuple(claims),
            sync_pods=tuple(pods.syncing),
            setup_pods=tuple(pods.setting_up),
            base=_base(caches, job),
        ),
        cluster=ObservedCluster(
            nodes=None if nodes is None else _named(nodes, mattering | roomy),
            promised=caches.pods.sums(PROMISED) if roomy else {},
            installed=installed,
            warnings=_warnings(caches, told_of),
        ),
        refused=RefusedWrites(conflicts=found, rejections=rejections),
    )


class _Pods(NamedTuple):
    """Those with the job's label, by what they do; `others` are not the job's."""

    workers: list[Pod]
    of_old_gangs: list[Pod]
    syncing: list[Pod]
    setting_up: list[Pod]
    probes: list[Pod]
    others: list[Pod]


def _pods(
    job: str, pods: Iterable[Pod], present: tuple[str, ...], owned: Callable[[ChildMeta], bool]
) -> _Pods:
    gangs, apart = _part(pods, lambda meta: meta.labels.component == names.WORKER)
    workers, older = _part(gangs, lambda meta: any(meta.controlled_by(j) for j in present))
    of_old_gangs, copies = _part(older, lambda meta: _was_worker(job, meta))
    preparing, others = _part(apart, owned)
    preparing.sort(key=lambda pod: names.number_of(pod.metadata.name))
    setting_up, rest = _part(preparing, lambda meta: meta.labels.component == names.SETUP)
    probes, syncing = _part(rest, lambda meta: meta.labels.component == names.PROBE)
    return _Pods(workers, of_old_gangs, syncing, setting_up, probes, [*others, *copies])


def _was_worker(job: str, meta: ChildMeta) -> bool:
    """Whether a Job made a pod of no present gang for this TorchrunJob, or an earlier one.

    The labels alone prove nothing: a copy for debugging may have them. What a Job makes has it for
    owner. It loses that where the Job is deleted without its pods, and keeps the Job's name in its
    own.
    """
    owners = [owner for owner in meta.owner_references if owner.controller]
    if owners:
        return any(owner.kind == JOBS.kind for owner in owners)
    return names.is_worker(job, meta.name)


def _warnings(caches: Caches, children: Iterable[Child]) -> tuple[CoreEvent, ...]:
    """What is said of these objects, the oldest first."""
    found = (
        warning
        for child in children
        for warning in caches.warnings.by_index(REGARDING_INDEX, child.metadata.uid)
    )
    return tuple(sorted(found, key=_when))


def _gang_of(attempts: list[Job], of_workers: list[Job]) -> tuple[str, ...]:
    """UIDs of the latest child Job and, where its pods are a head's, of that of its workers."""
    number = attempts[-1].metadata.labels.attempt if attempts else ""
    beside = [job for job in of_workers if job.metadata.labels.attempt == number]
    return tuple(job.metadata.uid for job in (*attempts[-1:], *beside))


def _base(caches: Caches, job: TorchrunJob) -> Base | None:
    namespace = job.metadata.namespace
    name = job.metadata.annotations.get(names.WORKSPACE_BASE, "")
    claim = caches.claims.get(namespace, names.workspace_claim(name)) if name else None
    if claim is None:
        return None
    pods = caches.pods.by_index(JOB_INDEX, index_key(namespace, name))
    return Base(claim=claim, in_use=any(alive(pod) for pod in pods))


def _parents(jobs: Store[TorchrunJob], job: TorchrunJob) -> dict[str, TorchrunJob]:
    """The jobs that it depends on, at first hand or through others."""
    found: dict[str, TorchrunJob] = {}
    open_ends = [job]
    while open_ends:
        for dependency in open_ends.pop().spec.depends_on:
            parent = jobs.get(job.metadata.namespace, dependency.name)
            if parent is not None and dependency.name not in found:
                found[dependency.name] = parent
                open_ends.append(parent)
    return found


def followers(jobs: Store[TorchrunJob], change: Change[TorchrunJob]) -> set[str]:
    """Names of the jobs for which a change of their parent may matter.

    An edit may close or open a cycle, which matters to all that follow, however far off.
    """
    old, new = change.old, change.new
    edited = old is None or new is None or old.spec.depends_on != new.spec.depends_on
    if not edited and _came_so_far(old) == _came_so_far(new):
        return set()
    meta = change.object.metadata
    found: set[str] = set()
    open_ends = [meta.name]
    while open_ends:
        parent = index_key(meta.namespace, open_ends.pop())
        names_of = {child.metadata.name for child in jobs.by_index(PARENT_INDEX, parent)} - found
        found |= names_of
        if edited:
            open_ends += names_of
    return found


def finished_parents(jobs: Store[TorchrunJob], change: Change[TorchrunJob]) -> set[str]:
    """Names of the finished jobs whose deletion may wait for this change of a dependent."""
    if change.old is None or (
        change.new is not None and _record_of(change.old) == _record_of(change.new)
    ):
        return set()
    namespace = change.object.metadata.namespace
    parents = (jobs.get(namespace, edge.name) for edge in change.old.spec.depends_on)
    return {
        parent.metadata.name
        for parent in parents
        if parent is not None and parent.status.phase in TERMINAL
    }


def _record_of(job: TorchrunJob) -> tuple[object, ...]:
    status = job.status
    ended = job.metadata.terminating or status.phase in TERMINAL
    return (ended, status.workers, status.dependencies_met, job.spec.depends_on)


def _came_so_far(job: TorchrunJob | None) -> tuple[object, ...]:
    return () if job is None else (job.status.phase, job.status.reason, job.status.start_time)


def _nodes_of(job: TorchrunJob, pods: list[Pod]) -> set[str]:
    """Names of the nodes that matter to a job: of its pods, past and present."""
    return {
        *(pod.spec.node_name for pod in pods),
        *job.status.worker_nodes,
        *(worker.node for worker in job.status.unfenced),
        *(attempt.node for attempt in job.status.attempts),
    }


def _stays_on_nodes(job: TorchrunJob, queue: TorchrunQueue | None) -> bool:
    """Whether the checkpoints of the job may be node-local; what comes of it, reconcile decides."""
    wanted = (job.spec.volumes.checkpoints, queue.spec.storage.checkpoints if queue else None)
    return any(storage is not None and storage.host_path for storage in wanted)


def _named(nodes: Store[Node], wanted: set[str]) -> dict[str, Node]:
    found = ((name, nodes.get("", name)) for name in sorted(wanted))
    return {name: node for name, node in found if node is not None}


def _part(children: Iterable[C], owned: Callable[[ChildMeta], bool]) -> tuple[list[C], list[C]]:
    """Ours and the others'."""
    ours: list[C] = []
    others: list[C] = []
    for child in children:
        (ours if owned(child.metadata) else others).append(child)
    return ours, others


def _conflict(kind: Kind[C], child: C) -> Conflict:
    meta = child.metadata
    owner = next((o for o in meta.owner_references if o.controller), None)
    whose = f"belongs to {owner.kind} {owner.name} (UID {owner.uid})" if owner else "has no owner"
    going = ", and is being deleted" if meta.deletion_timestamp else ""
    message = (
        f"{kind.resource} {meta.name} exists and {whose}{going};"
        " it is left alone: delete it, or give the job another name"
    )
    return Conflict(kind.resource, meta.name, message)


def _when(event: CoreEvent) -> datetime:
    return event.last_timestamp or event.metadata.creation_timestamp or _LONG_AGO
