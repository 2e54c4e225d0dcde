"""Fakes of everything around a controller's worker."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import anyio
from prometheus_client import CollectorRegistry

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ObjectMeta
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import JOBS, SERVICES, TORCHRUN_JOBS, Kind, UserObject
from torchrun_api.kinds.status import Phase, TorchrunJobStatus
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.client.apply import Status, WriteResult
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.controllers.controller import Controller
from torchrun_controller.controllers.job import JobReconciler
from torchrun_controller.controllers.writes import Writes
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.observed import Observed, Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event, Plan, StatusWrite
from torchrun_controller.workqueue import AsyncWorkQueue

KEY = ("team", "run")
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SERVICE = Apply(SERVICES, {"metadata": {"name": "run", "namespace": "team"}})
GONE = Delete(kind=JOBS, namespace="team", name="run", uid="u")
REJECTION = Rejection("services", "run", "Service 'run': not like this")


class Cache:
    resource_version = 0


class World:
    """A JobReconciler and its Controller with everything around them under the control of a test."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.busy = False
        self.cache = Cache()
        self.present: dict[tuple[str, str], Observed] = {KEY: observed()}
        self.plan: Callable[[Observed], Plan] = lambda _: Plan()
        self.observations: list[Observed] = []
        self.log: list[object] = []
        self.events: list[Event] = []
        self.failures: list[Exception] = []
        self.version = 0
        self.metrics = Metrics(CollectorRegistry())
        self.queue: AsyncWorkQueue[tuple[str, str]] = AsyncWorkQueue(self.clock)
        caches = {"services": self.cache, "torchrunjobs.torchrun.ai": self.cache}
        expectations: Expectations[tuple[str, str]] = Expectations(lambda _: caches, self.clock)
        self.reconciler = JobReconciler(
            observe=lambda namespace, name: self.present.get((namespace, name)),
            decide=self.decide,
            applier=self,
            writes=Writes(self, expectations, self.metrics, self.clock),
            events=self,
            metrics=self.metrics,
            is_busy=lambda: self.busy,
            clock=self.clock,
            now=lambda: NOW,
        )
        self.worker = Controller("job", self.queue, self.reconciler, self.metrics, clock=self.clock)

    def clock(self) -> float:
        return self.time

    def decide(self, observed: Observed, now: datetime) -> Plan:
        assert now == NOW
        self.observations.append(observed)
        return self.plan(observed)

    async def apply(self, intent: Apply) -> WriteResult:
        created = not intent.uid
        return self._write(
            intent, WriteResult(intent.kind, intent.name, "u", self._next(), created)
        )

    async def delete(self, delete: Delete) -> WriteResult | None:
        return self._write(delete, WriteResult(delete.kind, delete.name, "u", ""))

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = ""
    ) -> WriteResult | None:
        return self._write(
            status, WriteResult(TORCHRUN_JOBS, owner.metadata.name, "u", self._next())
        )

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        raise NotImplementedError

    async def find_workers(self, namespace: str, job: str) -> frozenset[str]:
        raise NotImplementedError

    def record(self, about: UserObject, event: Event) -> None:
        self.events.append(event)

    async def attempts(self, keys: int = 1) -> None:
        """Run the worker until `keys` keys are done, then stop it."""
        done = self.total_reconciles() + keys
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.worker.run)
            with anyio.fail_after(60):
                while self.total_reconciles() < done:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    def total_reconciles(self) -> float:
        (family,) = self.metrics.reconciles.collect()
        return sum(sample.value for sample in family.samples)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    def _write(self, what: object, written: WriteResult) -> WriteResult:
        if self.failures:
            raise self.failures.pop(0)
        self.log.append(what)
        return written


def observed(phase: Phase | None = None, generation: int = 1, queue: int = 1) -> Observed:
    return Observed(
        job=TorchrunJob(
            metadata=ObjectMeta(name="run", namespace="team", uid="job", generation=generation),
            status=TorchrunJobStatus(phase=phase),
        ),
        queue=TorchrunQueue(metadata=ObjectMeta(uid="queue", generation=queue)),
    )


def status(phase: Phase, message: str = "") -> TorchrunJobStatus:
    return TorchrunJobStatus(phase=phase, message=message)


def waiting_for(current: Observed) -> Plan:
    """A Plan like that of reconcile: it creates nothing while there is an obstacle."""
    if current.refused.conflicts or current.refused.rejections:
        return Plan(writes=(StatusWrite(status=status("Pending", "blocked")),))
    return Plan(writes=(SERVICE, StatusWrite(status=status("Running"))))
