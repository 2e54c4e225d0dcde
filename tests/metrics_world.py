"""Jobs and queues for the tests of their metrics."""

from datetime import UTC, datetime, timedelta

from prometheus_client import CollectorRegistry

from torchrun_api.kinds.core import Node, NodeCondition, NodeMeta, NodeSpec, NodeStatus
from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.meta import Condition, ObjectMeta
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.status import Phase, TorchrunJobStatus, UnfencedWorker
from torchrun_controller.cache.store import Change
from torchrun_controller.metrics.jobs import JobMetrics
from torchrun_controller.metrics.registry import Metrics

NOW = datetime(2026, 1, 2, 3, 0, 0, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def job(
    name: str,
    phase: Phase | None,
    *,
    queue: str = "gpu",
    namespace: str = "team",
    reason: str = "",
    gpus: int = 0,
    since: float = 0,
    unfenced: int = 0,
) -> TorchrunJob:
    """A job that has been in its phase for `since` seconds."""
    running = Condition(type="Running", status="True", reason="r", last_transition_time=ago(since))
    return TorchrunJob(
        metadata=ObjectMeta(name=name, namespace=namespace, creation_timestamp=ago(since)),
        spec=TorchrunJobSpec(job_queue=queue),
        status=TorchrunJobStatus(
            phase=phase,
            reason=reason,
            gpus=gpus,
            conditions=(running,),
            unfenced=(UnfencedWorker(node="n"),) * unfenced,
        ),
    )


def queue(name: str, namespace: str = "team") -> TorchrunQueue:
    return TorchrunQueue(metadata=ObjectMeta(name=name, namespace=namespace))


def node(name: str, gpus: str, *, ready: bool = True, cordoned: bool = False) -> Node:
    condition = NodeCondition(type="Ready", status="True" if ready else "False")
    return Node(
        metadata=NodeMeta(name=name),
        spec=NodeSpec(unschedulable=cordoned),
        status=NodeStatus(conditions=(condition,), allocatable={"nvidia.com/gpu": gpus}),
    )


class World:
    """Gauges of jobs, with time, leadership and nodes set by the test."""

    def __init__(self) -> None:
        self.time = NOW.timestamp()
        self.clock_step = 0.0  # by which the wall clock was set
        self.leads = True
        self.nodes: list[Node] | None = None
        self.metrics = Metrics(CollectorRegistry())
        self.census = JobMetrics(
            self.metrics.queue_labels,
            leads=lambda: self.leads,
            now=lambda: self.time + self.clock_step,
            monotonic=lambda: self.time,
            nodes=lambda: self.nodes,
            add_queue=self.metrics.add_queue,
            remove_queue=self.metrics.remove_queue,
        )
        self.metrics.register(self.census)
        self._jobs: dict[tuple[str, str], TorchrunJob] = {}
        self._queues: dict[tuple[str, str], TorchrunQueue] = {}

    def put(self, *objects: TorchrunJob | TorchrunQueue) -> None:
        for obj in objects:
            key = obj.metadata.namespace, obj.metadata.name
            if isinstance(obj, TorchrunJob):
                self.census.job_changed(Change(self._jobs.get(key), obj), False)
                self._jobs[key] = obj
            else:
                self.census.queue_changed(Change(self._queues.get(key), obj), False)
                self._queues[key] = obj

    def remove(self, *objects: TorchrunJob | TorchrunQueue) -> None:
        for obj in objects:
            key = obj.metadata.namespace, obj.metadata.name
            if isinstance(obj, TorchrunJob):
                self.census.job_changed(Change(self._jobs.pop(key), None), False)
            else:
                self.census.queue_changed(Change(self._queues.pop(key), None), False)

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """The non-zero samples of one metric, by the values of their labels."""
        samples = [
            (tuple(sample.labels.values()), sample.value)
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        ]
        assert len(dict(samples)) == len(samples), f"{name} has a series twice"
        return {labels: value for labels, value in samples if value}
