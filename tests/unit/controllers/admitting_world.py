"""The reconciler of admission with an API server, and with decisions that a test makes."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from torchrun_api.kinds.admission import Admission
from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.meta import ObjectMeta
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import Kind, UserObject, kind_of
from torchrun_controller.cache.admission_view import ObservedAdmission
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import Status, WriteResult
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.client.write_errors import SupersededError
from torchrun_controller.controllers.admission import (
    FIELD_MANAGER,
    AdmissionReconciler,
)
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.admission.classify import Classification
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    Grant,
    QueueSummary,
    Workload,
)
from torchrun_controller.reconcile.model.plan import Event

KEY = "all queues"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
QUEUE = TorchrunQueue(metadata=ObjectMeta(name="lab", namespace="t", uid="q", resource_version="9"))


class World:
    """An API server with jobs and one queue, and a cache that follows at `catch_up`."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.server: dict[str, UserObject] = {"q": QUEUE}
        self.cached: dict[str, UserObject] = {}
        self.held: dict[str, int] = defaultdict(int)
        self.state = ClusterState()
        self.decisions = Decisions()
        self.decided = 0
        self.log: list[str] = []
        self.statuses: dict[str, Status] = {}
        self.events: list[Event] = []
        self.failures: dict[str, list[tuple[Exception, bool]]] = defaultdict(list)
        self.always: dict[str, Exception] = {}  # the answer to every write of this object
        self.read_error: Exception | None = None
        self.seen = ClusterState()  # by the last decision
        self.newest = 100
        self.nodes_known = True
        self.next_lost_node: float | None = None
        self.metrics = Metrics(CollectorRegistry())
        self.accounts: list[tuple[QueueSummary, ...]] = []
        self.reconciler = AdmissionReconciler(
            view=self,
            decide=self.decide,
            applier=self,
            events=self,
            metrics=self.metrics,
            account=self.accounts.append,
            clock=lambda: self.time,
            now=lambda: NOW,
        )

    def job(self, name: str, *, held: int = 0, queue: str = "lab", priority: int = 0) -> None:
        admission = Admission(nodes=held, time=NOW) if held else None
        meta = ObjectMeta(name=name, namespace="t", uid=name, resource_version=str(self._next()))
        spec = TorchrunJobSpec(job_queue=queue, priority=priority)
        job = TorchrunJob(metadata=meta, spec=spec)
        status = replace(job.status, admission=admission)
        self.server[name] = replace(job, status=status)
        self.held[name] = held
        self.catch_up()

    def late_write(self, name: str) -> None:
        """Carry out a write of the job that was answered with an error."""
        written = self.server[name]
        meta = replace(written.metadata, resource_version=str(self._next()))
        self.server[name] = replace(written, metadata=meta)

    def catch_up(self) -> None:
        self.cached = dict(self.server)

    def decide(self, state: ClusterState, now: datetime) -> Decisions:
        self.decided += 1
        self.seen = state
        return self.decisions

    def observe(self, now: datetime) -> ObservedAdmission | None:
        if not self.nodes_known:
            return None
        jobs = [o for o in self.cached.values() if isinstance(o, TorchrunJob)]
        queues = [o for o in self.cached.values() if isinstance(o, TorchrunQueue)]
        entries = (ClassifiedJob(job, self.classification(job)) for job in jobs)
        return ObservedAdmission(
            state=self.state,
            entries=tuple(entries),
            queues=tuple(queues),
            next_lost_node=self.next_lost_node,
        )

    def classification(self, job: TorchrunJob) -> Classification:
        held = job.status.admission.nodes if job.status.admission else 0
        meta = job.metadata
        workload = Workload(
            namespace="t",
            name=meta.name,
            uid=meta.uid,
            queue=job.spec.job_queue,
            created=NOW,
            nodes=max(held, 2),
            priority=job.spec.priority or 0,
            admitted=held,
            since=NOW if held else None,
        )
        return Classification(workload=workload, takes_part=True)

    def version(self, owner: UserObject) -> str | None:
        found = self.cached.get(owner.metadata.uid)
        return found.metadata.resource_version if found is not None else None

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = ""
    ) -> WriteResult | None:
        assert manager == FIELD_MANAGER
        uid = owner.metadata.uid
        if uid in self.always:
            raise self.always[uid]
        failures = self.failures[uid]
        error, carried_out = failures.pop(0) if failures else (None, True)
        if isinstance(error, ApiError):
            raise error  # authorization precedes everything else
        present = self.server.get(uid)
        if present is None:
            return None
        if present.metadata.resource_version != owner.metadata.resource_version:
            raise SupersededError("changed meanwhile")
        if carried_out:
            meta = replace(present.metadata, resource_version=str(self._next()))
            self.server[uid] = replace(present, metadata=meta, status=status)
            self.log.append(uid)
            self.statuses[uid] = status
        if error is not None:
            raise error
        written = self.server[uid].metadata.resource_version
        return WriteResult(kind_of(owner), owner.metadata.name, uid, written)

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        if self.read_error is not None:
            raise self.read_error
        live = self.server.get(name)
        if live is None:
            return None
        meta = live.metadata
        return LiveObject(meta.uid, "", is_ending=False, version=meta.resource_version)

    def record(self, regarding: UserObject, event: Event) -> None:
        self.events.append(event)

    def _next(self) -> int:
        self.newest += 1
        return self.newest

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0


def admit(*names: str) -> Decisions:
    return Decisions(grants=tuple(Grant(uid=name, nodes=2) for name in names))
