"""The input of reconcile for one job, from the caches: `observe`, and the indexes that it reads."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import CoreEvent, Job, Node, PersistentVolumeClaim, Pod, Service
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ChildMeta
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS, SERVICES, Kind
from torchrun_controller.cache.progress_reports import Reports
from torchrun_controller.cache.store import Store
from torchrun_controller.reconcile.job import dependencies
from torchrun_controller.reconcile.model.observed import (
    Base,
    Conflict,
    Group,
    Installed,
    Observed,
    ObservedCluster,
    ObservedGang,
    ObservedWorkspace,
    RefusedWrites,
    Rejection,
    Vanished,
)
from torchrun_controller.reconcile.pods.lifecycle import (
    MAY_RUN,
    alive,
    attempt_of,
    index_of,
    is_worker_of,
    state_of,
)
from torchrun_controller.reconcile.pods.nodes import find_mass_silence, is_ready

Key: TypeAlias = tuple[str, str]
"""Namespace and name of a job or a queue: what the work queues hold."""

# Children by the job in their label; jobs by their queue.
JOB_INDEX = "torchrun-job"
QUEUE_INDEX = "queue"
# Jobs by the jobs that they depend on.
PARENT_INDEX = "parent"
# Workers, sync and setup pods by their machine; jobs by the machines of their unfenced workers.
NODE_INDEX = "node"
# Tally of the bytes that pods reserve on each machine for local checkpoints.
PROMISED = "promised"
# Warnings by the UID of the object that they regard.
REGARDING_INDEX = "regarding"

_EPOCH = datetime.min.replace(tzinfo=UTC)

Child = Job | Pod | PersistentVolumeClaim | Service
C = TypeVar("C", bound=Child)


def index_key(namespace: str, name: str) -> str:
    """Return the value of an index for an object: "namespace/name"."""
    return f"{namespace}/{name}"


def by_job(child: Child) -> Iterable[str]:
    """Index children by the job in their label."""
    meta = child.metadata
    return (index_key(meta.namespace, meta.labels.torchrun_job),)


def by_node(pod: Pod) -> Iterable[str]:
    """Index workers and helper pods by their machine."""
    is_affected = pod.metadata.labels.component in (names.WORKER, names.SYNC, names.SETUP)
    is_bound = pod.spec.node_name and is_affected
    return (pod.spec.node_name,) if is_bound else ()


def promised_storage(pod: Pod) -> tuple[str, int] | None:
    """Return the machine of a running pod, and the bytes that it reserves there for checkpoints."""
    size = names.number_in(pod.metadata.annotations.local_checkpoints)
    return (pod.spec.node_name, size) if size and pod.spec.node_name and alive(pod) else None


def by_unfenced_node(job: TorchrunJob) -> Iterable[str]:
    """Index jobs by the machines of their unfenced workers, whose pods may be deleted."""
    return {worker.node for worker in job.status.unfenced}


def by_queue(job: TorchrunJob) -> Iterable[str]:
    """Index jobs by their queue."""
    return (index_key(job.metadata.namespace, job.spec.job_queue),)


def by_parent(job: TorchrunJob) -> Iterable[str]:
    """Index jobs by the jobs that they depend on."""
    return {index_key(job.metadata.namespace, parent.name) for parent in job.spec.depends_on}


def by_regarding(event: CoreEvent) -> Iterable[str]:
    """Index warnings by the UID of the object that they regard."""
    return (event.involved_object.uid,)


class Caches(Struct, frozen=True, kw_only=True):
    """The stores: one for each kind."""

    jobs: Store[TorchrunJob]
    queues: Store[TorchrunQueue]
    pods: Store[Pod]
    child_jobs: Store[Job]
    claims: Store[PersistentVolumeClaim]
    services: Store[Service]
    warnings: Store[CoreEvent]


def empty_caches() -> Caches:
    """Return empty stores with every index that `observe` and `job_keys` read."""
    return Caches(
        jobs=Store({QUEUE_INDEX: by_queue, PARENT_INDEX: by_parent, NODE_INDEX: by_unfenced_node}),
        queues=Store(),
        pods=Store({JOB_INDEX: by_job, NODE_INDEX: by_node}, {PROMISED: promised_storage}),
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
    nodes_awaited: bool = False,
    conflicts: tuple[Conflict, ...] = (),
    rejections: tuple[Rejection, ...] = (),
    reports: Reports | None = None,
    installed: Installed | None = None,
    groups: Callable[[str], tuple[Group, ...]] = lambda owner: (),
    vanished: tuple[Vanished, ...] = (),
) -> Observed | None:
    """Return the input of reconcile for one job, from the caches; None if the job is not cached.

    The caches are those of the job's namespace. `nodes` is None while machines are unknown, and
    `nodes_awaited` if that is temporary. `conflicts` and `rejections` are refused writes to report;
    conflicts with cached objects are added. `groups` returns the scheduling groups that the object
    with a UID controls. Child Jobs are sorted by attempt, worker pods by name, helper pods by
    number, warnings by time. Does not raise.
    """
    job = caches.jobs.get(namespace, name)
    if job is None:
        return None
    key, uid = index_key(namespace, name), job.metadata.uid
    find_job = partial(caches.jobs.get, namespace)

    def is_owned(meta: ChildMeta) -> bool:
        return meta.controlled_by(uid) or meta.labels.retained_from == name

    jobs, other_jobs = _partition(caches.child_jobs.by_index(JOB_INDEX, key), is_owned)
    jobs.sort(key=attempt_of)
    worker_jobs, attempts = _partition(jobs, lambda meta: meta.labels.role == names.WORKER)
    latest = attempts[-1].metadata.uid if attempts else ""
    reports = Reports() if reports is None else reports
    current_jobs = _current_job_uids(attempts, worker_jobs)
    pods = _classify_pods(name, caches.pods.by_index(JOB_INDEX, key), current_jobs, is_owned)
    claims, other_claims = _partition(caches.claims.by_index(JOB_INDEX, key), is_owned)
    services, other_services = _partition(caches.services.by_index(JOB_INDEX, key), is_owned)
    all_conflicts = (
        *conflicts,
        *(_conflict(JOBS, other) for other in other_jobs),
        *(_conflict(PODS, other) for other in pods.others),
        *(_conflict(CLAIMS, other) for other in other_claims),
        *(_conflict(SERVICES, other) for other in other_services),
    )
    helper_pods = [*pods.sync, *pods.setup]
    objects_with_warnings: tuple[Child, ...] = (
        *claims,
        *attempts[-1:],
        *worker_jobs,
        *pods.workers,
        *helper_pods,
    )
    gang_pods = [*pods.workers, *pods.former_workers]
    stale_pods = [pod for pod in pods.former_workers if state_of(pod) in MAY_RUN]
    relevant_nodes = _relevant_nodes(
        job, [*gang_pods, *helper_pods, *(each.pod for each in vanished)]
    )
    queue = caches.queues.get(namespace, job.spec.job_queue)
    # The placement of node-local checkpoints considers every machine.
    all_nodes = (
        {node.metadata.name for node in nodes or ()} if _may_use_host_path(job, queue) else set()
    )
    return Observed(
        job=job,
        queue=queue,
        parents=_parents(job, find_job),
        waits_for=dependencies.follow(job, find_job),
        dependents=caches.jobs.by_index(PARENT_INDEX, key),
        gang=ObservedGang(
            child_jobs=tuple(attempts),
            worker_jobs=tuple(worker_jobs),
            workers=tuple(sorted(pods.workers, key=attrgetter("metadata.name"))),
            stale_pods=tuple(stale_pods),
            vanished=vanished,
            groups=(*groups(uid), *(groups(latest) if latest else ())),
            service=next(iter(services), None),
            progress=reports.of((namespace, name), latest),
            restarts=reports.restarts_of((namespace, name), latest),
            has_reported=reports.has_any((namespace, name), latest),
            checkpoints=reports.checkpoints_of((namespace, name), uid),
            former_leaders=tuple(
                pod
                for pod in pods.former_workers
                if pod.metadata.labels.job_uid == uid
                and index_of(pod) == 0
                and pod not in stale_pods
            ),
        ),
        workspace=ObservedWorkspace(
            claims=tuple(claims),
            sync_pods=tuple(pods.sync),
            setup_pods=tuple(pods.setup),
            base=_base(caches, job),
        ),
        cluster=ObservedCluster(
            nodes=None if nodes is None else _select_nodes(nodes, relevant_nodes | all_nodes),
            nodes_awaited=nodes_awaited,
            promised=caches.pods.sums(PROMISED) if all_nodes else {},
            installed=installed,
            warnings=_warnings(caches, objects_with_warnings),
        ),
        refused=RefusedWrites(conflicts=all_conflicts, rejections=rejections),
    )


class _Pods(NamedTuple):
    """The pods with the job's label, by role. `others` do not belong to the job."""

    workers: list[Pod]
    former_workers: list[Pod]
    sync: list[Pod]
    setup: list[Pod]
    others: list[Pod]


def _classify_pods(
    job: str,
    pods: Iterable[Pod],
    current_jobs: tuple[str, ...],
    is_owned: Callable[[ChildMeta], bool],
) -> _Pods:
    gang_pods, other_pods = _partition(pods, lambda meta: meta.labels.component == names.WORKER)
    workers, unowned_pods = _partition(
        gang_pods, lambda meta: any(meta.controlled_by(uid) for uid in current_jobs)
    )
    former_workers, copies = _partition(unowned_pods, lambda meta: is_worker_of(job, meta))
    helpers, other_helpers = _partition(other_pods, is_owned)
    helpers.sort(key=lambda pod: names.number_of(pod.metadata.name))
    setup, sync = _partition(helpers, lambda meta: meta.labels.component == names.SETUP)
    return _Pods(workers, former_workers, sync, setup, [*other_helpers, *copies])


def _warnings(caches: Caches, children: Iterable[Child]) -> tuple[CoreEvent, ...]:
    """Return the warnings that regard these objects, the oldest first."""
    warnings = (
        warning
        for child in children
        for warning in caches.warnings.by_index(REGARDING_INDEX, child.metadata.uid)
    )
    return tuple(sorted(warnings, key=_event_time))


def _current_job_uids(attempts: list[Job], worker_jobs: list[Job]) -> tuple[str, ...]:
    """Return the UIDs of the latest child Job, and of the workers' Job if the gang has a head."""
    number = attempts[-1].metadata.labels.attempt if attempts else ""
    current_workers = [job for job in worker_jobs if job.metadata.labels.attempt == number]
    return tuple(job.metadata.uid for job in (*attempts[-1:], *current_workers))


def _base(caches: Caches, job: TorchrunJob) -> Base | None:
    """Return the PVC of the workspace that this job's is based on; None without one."""
    namespace = job.metadata.namespace
    name = job.metadata.annotations.get(names.WORKSPACE_BASE, "")
    claim = caches.claims.get(namespace, names.workspace_claim(name)) if name else None
    if claim is None:
        return None
    pods = caches.pods.by_index(JOB_INDEX, index_key(namespace, name))
    return Base(claim=claim, in_use=any(alive(pod) for pod in pods))


def _parents(job: TorchrunJob, find: Callable[[str], TorchrunJob | None]) -> dict[str, TorchrunJob]:
    """Return the existing jobs that this one depends on, by name."""
    parents = ((dependency.name, find(dependency.name)) for dependency in job.spec.depends_on)
    return {name: parent for name, parent in parents if parent is not None}


def _relevant_nodes(job: TorchrunJob, pods: list[Pod]) -> set[str]:
    """Return the names of the machines of the job's current and earlier pods."""
    return {
        *(pod.spec.node_name for pod in pods),
        *job.status.worker_nodes,
        *(worker.node for worker in job.status.unfenced),
        *(attempt.node for attempt in job.status.attempts),
    }


def _may_use_host_path(job: TorchrunJob, queue: TorchrunQueue | None) -> bool:
    """Whether job or queue name a hostPath for checkpoints; reconcile decides between them."""
    storages = (job.spec.volumes.checkpoints, queue.spec.storage.checkpoints if queue else None)
    return any(storage is not None and storage.host_path for storage in storages)


def _select_nodes(nodes: Store[Node], node_names: set[str]) -> dict[str, Node]:
    """Return the cached machines of these names, sorted by name, with the doubt of silence."""
    cached_nodes = ((name, nodes.get("", name)) for name in sorted(node_names))
    selected = {name: node for name, node in cached_nodes if node is not None}
    if all(map(is_ready, selected.values())):
        return selected
    doubted = find_mass_silence(nodes)
    return {name: replace(node, doubted_until=doubted.get(name)) for name, node in selected.items()}


def _partition(
    children: Iterable[C], belongs: Callable[[ChildMeta], bool]
) -> tuple[list[C], list[C]]:
    """Split objects by their metadata: those for which `belongs` is true, and the others."""
    matches: list[C] = []
    others: list[C] = []
    for child in children:
        (matches if belongs(child.metadata) else others).append(child)
    return matches, others


def _conflict(kind: Kind[C], child: C) -> Conflict:
    """Return the conflict with an object that has the job's label but another owner."""
    meta = child.metadata
    owner = next((o for o in meta.owner_references if o.controller), None)
    ownership = (
        f"belongs to {owner.kind} {owner.name} (UID {owner.uid})" if owner else "has no owner"
    )
    deletion = " and is being deleted" if meta.deletion_timestamp else ""
    message = (
        f"{kind.kind} {meta.name} already exists and {ownership}{deletion}."
        " Delete it or choose another name for the job."
    )
    return Conflict(kind.resource, meta.name, message)


def _event_time(event: CoreEvent) -> datetime:
    return event.last_timestamp or event.metadata.creation_timestamp or _EPOCH
