"""The view of admission with caches that a test fills."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from torchrun_api.kinds.core import Job, Node, Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_controller.cache.admission_view import (
    ADMISSION,
    COALESCE,
    AdmissionView,
    ObservedAdmission,
)
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.clock import Clock
from torchrun_controller.workqueue import WorkQueue

GPU = "nvidia.com/gpu"
POD_SPEC = {"containers": [{"resources": {"requests": {GPU: "8"}}}]}
NEVER_SENT: Any = None  # without running informers
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
THEN = "2026-01-02T03:04:00Z"


class World:
    def __init__(self, *, by_nodes: bool = True, **options: Any) -> None:
        self.time = 0.0
        keys: WorkQueue[tuple[str, str]] = WorkQueue(lambda: 0.0)
        self.work: WorkQueue[str] = WorkQueue(lambda: self.time)
        still = Clock(monotonic=lambda: 0.0)
        self.factory = InformerFactory(NEVER_SENT, keys, clock=still)
        self.watch = AdmissionView(self.factory, self.work, by_nodes=by_nodes, **options)
        self.factory.nodes.informer.synced.set()
        self.version = 0

    def change(self, obj: Any, *, gone: bool = False) -> None:
        """Update the store, then call the handler, as the informer does."""
        self.version += 1
        for informer in self.factory.informers:
            if informer.kind.type is type(obj):
                if gone:
                    meta = obj.metadata
                    change = informer.store.delete(meta.namespace, meta.name, self.version)
                else:
                    change = informer.store.upsert(obj, self.version)
                assert change is not None
                informer._on_change(change, False)

    def awake(self) -> bool:
        """Whether the key is ready after the batching delay; takes the key."""
        self.time += COALESCE
        key = self.work.get()
        if key is not None:
            assert key == ADMISSION
            self.work.done(key)
        return key is not None

    def seen(self, now: datetime = NOW) -> ObservedAdmission:
        found = self.watch.observe(now)
        assert found is not None
        return found


def a_queue(name: str = "lab", generation: int = 1, **spec: object) -> TorchrunQueue:
    meta = {"name": name, "namespace": "team", "uid": name, "generation": generation}
    return msgspec.convert({"metadata": meta, "spec": spec}, TorchrunQueue)


def a_job(name: str = "run", version: int = 1, **status: object) -> TorchrunJob:
    asks = {"type": "AdmissionRequested", "status": "True", "reason": "WaitingForAdmission"}
    body = {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
        },
        "spec": {"jobQueue": "lab", "numNodes": 2, "command": "c"},
        "status": status if "phase" in status else {**status, "conditions": [asks]},
    }
    return msgspec.convert(body, TorchrunJob)


def a_gang(job: str = "run") -> Job:
    owner = {"kind": "TorchrunJob", "name": job, "uid": f"uid-{job}", "controller": True}
    labels = {"torchrun-job-name": job, "torchrun.ai/attempt": "0"}
    meta = {"name": job, "namespace": "team", "uid": f"gang-{job}", "labels": labels}
    body = {
        "metadata": {**meta, "ownerReferences": [owner]},
        "spec": {"completions": 2, "parallelism": 2, "template": {"spec": POD_SPEC}},
    }
    return msgspec.convert(body, Job)


def a_pod(
    index: int = 0,
    job: str = "run",
    phase: str = "Running",
    node: str = "n",
    component: str = "worker",
) -> Pod:
    labels = {
        "torchrun-job-name": job,
        "app.kubernetes.io/component": component,
        "torchrun.ai/attempt": "0",
    }
    owner = {"kind": "Job", "uid": f"gang-{job}"}
    body = {
        "metadata": {
            "name": f"{job}-{index}",
            "namespace": "team",
            "labels": labels,
            "ownerReferences": [owner | {"name": job, "controller": True}],
        },
        "spec": {"nodeName": node, **POD_SPEC},
        "status": {"phase": phase},
    }
    return msgspec.convert(body, Pod)


def a_node(name: str = "n", ready: str = "True", **allocatable: str) -> Node:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": THEN}
    status = {"conditions": [condition], "allocatable": allocatable}
    return msgspec.convert({"metadata": {"name": name}, "status": status}, Node)


ADMITTED_STATUS = {
    "admission": {"nodes": 2, "time": THEN},
    "conditions": [{"type": "Admitted", "status": "True"}],
    "phase": "Running",
    "reason": "WorkersRunning",
}


def charged(child: Any, job: str = "uid-run", **meta: object) -> Any:
    """The object with the labels of its job and its queue."""
    labels = replace(child.metadata.labels, job_uid=job, queue="lab")
    return replace(child, metadata=replace(child.metadata, labels=labels, **meta))
