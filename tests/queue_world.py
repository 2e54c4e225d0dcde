"""A world of one queue for tests of the pure core. It executes QueuePlans and plays the cluster."""

import itertools
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.extras import KaiQueue
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition, ConditionStatus
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_api.kinds.resources import KAI_QUEUES, TORCHRUN_QUEUES
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event
from torchrun_controller.reconcile.queue import (
    ObservedQueue,
    QueuePlan,
    TemplateCheck,
    reconcile_queue,
)
from torchrun_controller.reconcile.queue.model import NOT_SYNCED
from world import DEFAULTS, START

KAI = Installed(resources=frozenset({(KAI_QUEUES.api_version, KAI_QUEUES.plural)}))
NOTHING = Installed()


def make_trq(name: str = "gpu", namespace: str = "ml", age: int = 0, **spec: Any) -> TorchrunQueue:
    """A TorchrunQueue as the API server would send it, `age` seconds older than the start."""
    body: JsonObject = {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "generation": 1,
            "creationTimestamp": (START - timedelta(seconds=age)).isoformat(),
        },
        "spec": {"image": "pytorch/pytorch", **spec},
    }
    return msgspec.convert(body, TorchrunQueue)


def a_job(name: str, phase: str | None = None, *, gang: bool = False) -> TorchrunJob:
    """A job of the queue; with `gang` it has workers."""
    status: JsonObject = {"phase": phase} if phase else {}
    if gang:
        status["workers"] = {"running": 1}
    body: JsonObject = {
        "metadata": {"name": name, "namespace": "ml", "uid": f"uid-{name}"},
        "spec": {"jobQueue": "gpu", "numNodes": 1, "command": "true"},
        "status": status,
    }
    return msgspec.convert(body, TorchrunJob)


def kai_queue(name: str, owner: str = "", **spec: Any) -> KaiQueue:
    """A KAI queue, of a TorchrunQueue or foreign."""
    annotations: JsonObject = {names.KAI_OWNER: owner} if owner else {}
    meta: JsonObject = {
        "name": name,
        "uid": f"uid-kai-{name}",
        "resourceVersion": "1",
        "annotations": annotations,
    }
    return msgspec.convert({"metadata": meta, "spec": spec}, KaiQueue)


class QueueWorld:
    """One queue, its objects, and the state that the controller observes."""

    def __init__(self, queue: TorchrunQueue, installed: Installed | None = NOTHING) -> None:
        self.queue: TorchrunQueue | None = queue
        self.now = START
        self.jobs: list[TorchrunJob] = []
        self.kai: dict[str, KaiQueue] | None = {}
        self.installed = installed
        self.defaults = DEFAULTS
        self.kai_users: tuple[TorchrunQueue, ...] = ()
        self.refused: dict[tuple[str, str], str] = {}
        self.kai_problem = NOT_SYNCED
        self.namespace = ""
        self.verdict: TemplateCheck | None = None
        self.trial_result: tuple[ConditionStatus, str] = ("True", "")
        self.trials: list[JsonObject] = []
        self.plans: list[QueuePlan] = []
        self.events: list[Event] = []
        self._uids = itertools.count(1)

    def observed(self) -> ObservedQueue:
        assert self.queue is not None
        return ObservedQueue(
            queue=self.queue,
            jobs=tuple(self.jobs),
            installed=self.installed,
            kai=self.kai,
            kai_problem=self.kai_problem,
            kai_users=self.kai_users,
            refused=self.refused,
            template_check=self.verdict,
            namespace=self.namespace,
        )

    def decide(self) -> QueuePlan:
        """One Plan, with the results of its trials."""
        plan = reconcile_queue(self.observed(), self.now, self.defaults)
        if plan.trial is not None:
            assert self.queue is not None
            self.trials.append(plan.trial.body)
            status, message = self.trial_result
            self.verdict = TemplateCheck(self.queue.metadata.generation, status, message)
            plan = reconcile_queue(self.observed(), self.now, self.defaults)
        assert plan.trial is None
        return plan

    def step(self) -> QueuePlan:
        """Decide and execute the Plan."""
        plan = self.decide()
        self.plans.append(plan)
        writes: tuple[Apply | Delete, ...] = (*plan.applies, *plan.deletes)
        for write in writes:
            self.write(write)
        if plan.status is not None:
            self.write_status(plan.status)
        self.events += plan.events
        return plan

    def write(self, write: Apply | Delete) -> None:
        """Execute one write of a Plan."""
        if isinstance(write, Apply):
            self._apply(write.kind.kind, write.body, write.uid)
        else:
            self._delete(write.kind.kind, write.name, write.uid)

    def write_status(self, status: TorchrunQueueStatus) -> None:
        """Store it, unless the queue is gone."""
        if self.queue is not None:
            self.queue = replace(self.queue, status=status)

    def settle(self) -> None:
        """Execute Plans until one is empty."""
        for _ in range(6):
            if self.queue is None or self.step() == QueuePlan():
                return
        raise AssertionError(f"no rest: {self.plans[-1]}")

    def edit(self, **spec: Any) -> None:
        """Change the spec, as kubectl apply does."""
        assert self.queue is not None
        meta = self.queue.metadata
        edited = make_trq(meta.name, meta.namespace, **spec)
        later = replace(meta, generation=meta.generation + 1)
        self.queue = replace(self.queue, spec=edited.spec, metadata=later)

    def delete(self) -> None:
        """Delete the queue, which has finalizers, as kubectl delete does."""
        assert self.queue is not None
        meta = replace(self.queue.metadata, deletion_timestamp=self.now)
        self.queue = replace(self.queue, metadata=meta)

    def condition(self, kind: str) -> Condition:
        assert self.queue is not None
        return next(c for c in self.queue.status.conditions if c.type == kind)

    def condition_types(self) -> list[str]:
        assert self.queue is not None
        return [c.type for c in self.queue.status.conditions]

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]

    def _apply(self, kind: str, body: Any, uid: str) -> None:
        assert self.queue is not None
        if kind == TORCHRUN_QUEUES.kind:
            assert uid == self.queue.metadata.uid
            self._finalizers(tuple(body["metadata"]["finalizers"]))
            return
        name = body["metadata"]["name"]
        assert kind == KAI_QUEUES.kind
        assert self.kai is not None
        assert uid == (self.kai[name].metadata.uid if name in self.kai else "")
        metadata = {**body["metadata"], "uid": uid or f"uid-{next(self._uids)}"}
        self.kai[name] = msgspec.convert({**body, "metadata": metadata}, KaiQueue)

    def _finalizers(self, finalizers: tuple[str, ...]) -> None:
        assert self.queue is not None
        meta = replace(self.queue.metadata, finalizers=finalizers)
        gone = meta.deletion_timestamp is not None and not finalizers
        self.queue = None if gone else replace(self.queue, metadata=meta)

    def _delete(self, kind: str, name: str, uid: str) -> None:
        assert kind == KAI_QUEUES.kind
        assert self.kai is not None
        assert self.kai[name].metadata.uid == uid
        del self.kai[name]
