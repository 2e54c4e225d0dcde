"""A job under the real JobReconciler and reconcile, with an API server that refuses some writes."""

import asyncio
from datetime import timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from torchrun_api.kinds import JOBS, TORCHRUN_JOBS, Kind, UserObject
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import Status, WriteResult
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.client.write_errors import (
    RejectedError,
    UnavailableError,
)
from torchrun_controller.controllers.controller import Outcome
from torchrun_controller.controllers.job import JobReconciler
from torchrun_controller.controllers.writes import Writes
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.model.observed import Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event
from torchrun_controller.reconcile.pods.lifecycle import alive
from world import DEFAULTS, World

KEY = ("ml", "train")
QUOTA = "exceeded quota: few"
NO_ANSWER = 'failed calling webhook "w.example.com": connection refused'


class Cluster:
    """The world of one job. Its API server refuses the writes in `refuses`: (kind, name)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.refuses: set[tuple[str, str]] = set()
        self.forbids_deletes: set[tuple[str, str]] = set()
        self.fails_webhook: set[tuple[str, str]] = set()  # applies and deletes
        self.fails: set[tuple[str, str]] = set()  # applies for which it is not available
        self.loses_status = False
        self.requests: list[tuple[str, str]] = []  # every apply and delete that was sent
        self.events: list[Event] = []
        metrics = Metrics(CollectorRegistry())
        expectations: Expectations[tuple[str, str]] = Expectations(lambda _: {}, self.clock)
        self.reconciler = JobReconciler(
            observe=lambda namespace, name: world.observed(),
            decide=lambda observed, now: reconcile(observed, now, DEFAULTS),
            applier=self,
            writes=Writes(self, expectations, metrics, self.clock),
            events=self,
            metrics=metrics,
            clock=self.clock,
            now=lambda: world.now,
        )

    def clock(self) -> float:
        return self.world.now.timestamp()

    async def attempt(self) -> Outcome:
        """Run one attempt, after the throttle of the status has passed."""
        self.world.pass_time(seconds=2)
        return await self.reconciler.attempt(KEY)

    async def attempts(self, minutes: int) -> None:
        """Run one attempt each minute, like the requeue after a refusal."""
        for _ in range(minutes):
            await self.attempt()
            self.world.now += timedelta(minutes=1)

    async def apply(self, intent: Apply) -> WriteResult:
        self.requests.append((intent.kind.kind, intent.name))
        if (intent.kind.kind, intent.name) in self.refuses:
            rejection = Rejection(intent.kind.resource, intent.name, QUOTA)
            raise RejectedError(rejection, permanent=False)
        if (intent.kind.kind, intent.name) in self.fails_webhook:
            rejection = Rejection(intent.kind.resource, intent.name, NO_ANSWER)
            raise RejectedError(rejection, permanent=False)
        if (intent.kind.kind, intent.name) in self.fails:
            raise UnavailableError("the server is down")
        await asyncio.sleep(0)
        self.world.write(intent)
        return WriteResult(intent.kind, intent.name, "u", "", created=not intent.uid)

    async def delete(self, delete: Delete) -> WriteResult | None:
        self.requests.append((delete.kind.kind, delete.name))
        if (delete.kind.kind, delete.name) in self.forbids_deletes:
            raise ApiError(403, "Forbidden", f"{delete.name} may not be deleted")
        if (delete.kind.kind, delete.name) in self.fails_webhook:
            rejection = Rejection(delete.kind.resource, delete.name, NO_ANSWER, verb="delete")
            raise RejectedError(rejection, permanent=False)
        self.world.write(delete)
        return WriteResult(delete.kind, delete.name, delete.uid, "")

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        if kind is TORCHRUN_JOBS:
            return LiveObject(self.world.job.metadata.uid, "", is_ending=False)
        child = self.world.objects.get((JOBS.plural, name))
        return (
            None if child is None else LiveObject(child.metadata.uid, "uid-train", is_ending=False)
        )

    async def find_workers(self, namespace: str, job: str) -> frozenset[str]:
        return frozenset(p.metadata.uid for p in self.world.workers() if alive(p))

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = ""
    ) -> WriteResult | None:
        assert isinstance(status, TorchrunJobStatus)
        if not self.loses_status:
            self.world.write_status(status)
        return WriteResult(TORCHRUN_JOBS, owner.metadata.name, "u", "")

    def record(self, about: UserObject, event: Event) -> None:
        self.events.append(event)
