"""One job, its queue and the objects of its Plans, as stored by an API server."""

import itertools
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject, object_at
from torchrun_api.kinds.core import (
    CoreEvent,
    Job,
    NetworkPolicy,
    Node,
    PersistentVolumeClaim,
    Pod,
    SchedulingGroup,
    Service,
)
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import (
    CLAIMS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SECRETS,
    SERVICES,
    TORCHRUN_JOBS,
    Kind,
    Object,
)
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.cache.observe import Caches, empty_caches, observe
from torchrun_controller.cache.progress_reports import Reports
from torchrun_controller.cache.store import Store
from torchrun_controller.reconcile import Conflict, Observed, Rejection
from torchrun_controller.reconcile.model.conditions import ADMITTED
from torchrun_controller.reconcile.model.observed import Group, Installed, Vanished
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods.head_and_workers import TRACKED
from torchrun_controller.reconcile.pods.lifecycle import alive

T = TypeVar("T", bound=Object)

TYPES: dict[str, type[Any]] = {
    JOBS.plural: Job,
    PODS.plural: Pod,
    CLAIMS.plural: PersistentVolumeClaim,
    SERVICES.plural: Service,
    NETWORK_POLICIES.plural: NetworkPolicy,
    "podgroups": SchedulingGroup,
    "workloads": SchedulingGroup,
}


def _filled(store: Store[T], objects: Iterable[T]) -> Store[T]:
    for obj in objects:
        store.upsert(obj, 0)
    return store


class WorldObjects:
    """One job, its queue and their objects, and how writes change them."""

    def __init__(self, job: TorchrunJob, queue: TorchrunQueue | None, now: datetime) -> None:
        self.job = job
        self.queue = queue
        self.now = now
        self.objects: dict[tuple[str, str], Any] = {}
        self.vanished: tuple[Vanished, ...] = ()
        self.gone = False
        self.conflicts: tuple[Conflict, ...] = ()
        self.neighbours: list[TorchrunJob] = []  # other jobs of the namespace
        self.rejections: tuple[Rejection, ...] = ()
        self.warnings: list[CoreEvent] = []
        self.nodes: dict[str, Node] | None = None
        self.nodes_awaited = False
        self.installed: Installed | None = Installed()
        self.suffix = "abcde"  # of the names of pods; a cluster has no vowels in it
        self.kinds: dict[str, Kind[SchedulingGroup]] = {}  # of groups, by their plurals
        self.created: list[tuple[str, str]] = []
        self.gangs: list[Job] = []
        self.templates: dict[str, Any] = {}  # of pods, by the UID of their Job
        self.reports = Reports()
        self._uids = itertools.count(1)

    def observed(self) -> Observed:
        """The Observed value of the real caches and the real `observe`."""
        observed = observe(
            self._caches(),
            self.job.metadata.namespace,
            self.job.metadata.name,
            nodes=None if self.nodes is None else _filled(Store(), self.nodes.values()),
            nodes_awaited=self.nodes_awaited,
            conflicts=self.conflicts,
            rejections=self.rejections,
            reports=self.reports,
            installed=self.installed,
            groups=self._groups_of,
            vanished=self.vanished,
        )
        assert observed is not None, "the job always exists"
        return observed

    def _caches(self) -> Caches:
        caches = empty_caches()
        queues = () if self.queue is None else (self.queue,)
        stores: dict[type[Any], Store[Any]] = {
            Job: caches.child_jobs,
            Pod: caches.pods,
            PersistentVolumeClaim: caches.claims,
            Service: caches.services,
        }
        for obj in self.objects.values():
            if type(obj) in stores:
                stores[type(obj)].upsert(obj, 0)
        _filled(caches.jobs, (self.job, *self.neighbours))
        _filled(caches.queues, queues)
        _filled(caches.warnings, self.warnings)
        return caches

    def _groups_of(self, owner: str) -> tuple[Group, ...]:
        return tuple(
            Group(self.kinds[plural], group)
            for (plural, _), group in self.objects.items()
            if plural in self.kinds and group.metadata.controlled_by(owner)
        )

    def write(self, write: Apply | Delete) -> None:
        """Execute one write of a Plan."""
        if isinstance(write, Apply):
            self._create(write)
        else:
            self._delete(write)

    def write_status(self, status: TorchrunJobStatus) -> None:
        """Store it after a JSON round trip, and keep the fields of other managers."""
        wire = msgspec.json.decode(msgspec.json.encode(status), type=type(status))
        present = self.job.status
        others = tuple(c for c in present.conditions if c.type == ADMITTED)
        status = replace(
            wire,
            conditions=wire.conditions + others,
            admission=present.admission,
            queue_position=present.queue_position,
        )
        self.job = replace(self.job, status=status)

    def _delete(self, delete: Delete) -> None:
        """Delete like API server and garbage collector. Pods terminate until containers stop."""
        if delete.collection:
            self._delete_pods(delete)
            return
        key = (delete.kind.plural, delete.name)
        if delete.kind is JOBS and delete.resource_version != self._version(key):
            return  # 409: the caller reconciles again
        if delete.kind is TORCHRUN_JOBS:
            self.gone = True
        elif delete.kind is PODS and self._takes_time(self.objects[key]):
            self._ending(key, 30 if delete.grace_seconds is None else delete.grace_seconds)
        else:
            removed = self.objects.pop(key)
            for other, pod in list(self.objects.items()):
                if isinstance(pod, Pod) and pod.metadata.controlled_by(removed.metadata.uid):
                    self._ending(other, 30)

    def _delete_pods(self, delete: Delete) -> None:
        """Delete the pods of a Job that have not ended."""
        assert delete.grace_seconds is not None
        for key, pod in list(self.objects.items()):
            if not (isinstance(pod, Pod) and pod.metadata.controlled_by(delete.uid)):
                continue
            if alive(pod):
                self._ending(key, delete.grace_seconds)

    def _takes_time(self, pod: Pod) -> bool:
        """Whether a deleted pod stays for its grace period, or until its kubelet reports again."""
        is_worker = pod.metadata.labels.component == names.WORKER
        return is_worker or not self.is_ready(pod.spec.node_name)

    def _version(self, key: tuple[str, str]) -> str:
        return str(self.objects[key].metadata.resource_version)

    def _ending(self, key: tuple[str, str], grace: int) -> None:
        pod: Pod = self.objects[key]
        if not alive(pod) or grace == 0:
            del self.objects[key]
            return
        meta = replace(
            pod.metadata,
            deletion_timestamp=self.now + timedelta(seconds=grace),
            deletion_grace_period_seconds=grace,
        )
        self.objects[key] = replace(pod, metadata=meta)

    def _released(self, key: tuple[str, str], grace: int = 30) -> None:
        """Delete a pod like the Job controller of a suspended Job: it does not count as failed."""
        pod: Pod = self.objects[key]
        self.objects[key] = replace(pod, metadata=replace(pod.metadata, finalizers=()))
        self._ending(key, grace)

    def containers_stop(self) -> None:
        """Remove every terminating pod, except on nodes that are not Ready."""
        for key, value in list(self.objects.items()):
            if not isinstance(value, Pod) or value.metadata.deletion_timestamp is None:
                continue
            if self.is_ready(value.spec.node_name):
                del self.objects[key]

    def is_ready(self, node: str) -> bool:
        """Whether the node is Ready. True if nodes are unknown."""
        if self.nodes is None or not node:
            return True
        return node in self.nodes and self.nodes[node].status.conditions[0].status == "True"

    def _create(self, apply: Apply) -> None:
        key = (apply.kind.plural, apply.name)
        if apply.uid:
            stored = self.objects[key]
            assert stored.metadata.uid == apply.uid
            annotations = msgspec.convert(apply.body, TYPES[apply.kind.plural]).metadata.annotations
            # The pod template has these, so the Job controller keeps them.
            before = stored.metadata.annotations
            annotations = replace(annotations, gate=before.gate)
            self.objects[key] = replace(
                stored, metadata=replace(stored.metadata, annotations=annotations)
            )
            return
        if apply.kind is SECRETS:
            return  # the controller cannot see whether it exists
        if apply.kind is NETWORK_POLICIES and key in self.objects:
            return  # not watched, so it is applied for each gang
        assert key not in self.objects, f"{key} is created twice"
        created = msgspec.convert(apply.body, TYPES[apply.kind.plural])
        meta = replace(
            created.metadata,
            uid=f"uid-{next(self._uids)}",
            creation_timestamp=self.now,
            resource_version="1",
        )
        self.objects[key] = replace(created, metadata=meta)
        self.created.append(key)
        if isinstance(created, SchedulingGroup):
            self.kinds[apply.kind.plural] = apply.kind
        if apply.kind is JOBS:
            if meta.labels.role != names.WORKER:
                self.gangs.append(self.objects[key])
            spec = object_at(apply.body, "spec")
            self.templates[meta.uid] = spec["template"]
            self._spawn(self.objects[key])

    def resume_child(self, name: str) -> None:
        """Someone resumes a child Job, and the Job controller creates new pods."""
        for pod in self.observed().gang.workers:
            del self.objects[PODS.plural, pod.metadata.name]
        child: Job = self.objects[JOBS.plural, name]
        self.objects[JOBS.plural, name] = replace(child, spec=replace(child.spec, suspend=False))
        self._spawn(child)

    def _spawn(self, child: Job) -> None:
        for index in range(child.spec.completions or 1):
            self._spawn_pod(child, index, self.suffix)

    def _spawn_pod(self, child: Job, index: int, suffix: str) -> None:
        """Create a pod like the Job controller."""
        template = self.templates[child.metadata.uid]["metadata"]
        name = f"{child.metadata.name}-{index}-{suffix}"
        pod: JsonObject = {
            "metadata": {
                "name": name,
                "namespace": "ml",
                "uid": f"uid-{next(self._uids)}",
                "resourceVersion": "1",
                "creationTimestamp": self.now.isoformat(),
                "labels": {**template["labels"], names.COMPLETION_INDEX_LABEL: str(index)},
                "annotations": template.get("annotations", {}),
                "finalizers": [TRACKED],
                "ownerReferences": [
                    {
                        "kind": "Job",
                        "name": child.metadata.name,
                        "uid": child.metadata.uid,
                        "controller": True,
                    }
                ],
            },
            "spec": self.templates[child.metadata.uid].get("spec", {}),
            "status": {"phase": "Pending"},
        }
        self.objects[PODS.plural, name] = msgspec.convert(pod, Pod)
