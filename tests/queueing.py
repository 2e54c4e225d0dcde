"""Short forms for a ClusterState."""

from datetime import UTC, datetime, timedelta
from typing import Any

from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    NodeCapacity,
    Queue,
    QuotaLimits,
    Workload,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GPU = "nvidia.com/gpu"


def node(name: str, gpus: int = 8, **fields: Any) -> NodeCapacity:
    return NodeCapacity(name=name, allocatable={GPU: gpus, "cpu": 96_000}, **fields)


def nodes(count: int, gpus: int = 8) -> tuple[NodeCapacity, ...]:
    return tuple(node(f"n{i:03}", gpus) for i in range(count))


def queue(
    name: str, weight: int | None = 1, *, quota: dict[str, int] | None = None, **fields: Any
) -> Queue:
    return Queue(
        namespace="team", name=name, weight=weight, quota=QuotaLimits(**(quota or {})), **fields
    )


def request(
    name: str, queue: str, nodes: int = 1, gpus: int = 8, *, age: float = 0, **fields: Any
) -> Workload:
    """`age` in seconds; the uid is the name."""
    requests: dict[str, Any] = {"pod": {"cpu": 1000}}
    if gpus:
        requests = {"pod": {GPU: gpus}, "gpus": gpus}
    return Workload(
        namespace="team",
        name=name,
        uid=name,
        queue=queue,
        created=NOW - timedelta(seconds=age),
        nodes=nodes,
        **requests,
        **fields,
    )


def admitted_workload(
    name: str, queue: str, nodes: int = 1, gpus: int = 8, *, admitted_for: float = 0, **fields: Any
) -> Workload:
    """Admitted `admitted_for` seconds ago, with all its nodes unless `admitted` is given."""
    fields = {"admitted": nodes, "since": NOW - timedelta(seconds=admitted_for), **fields}
    return request(name, queue, nodes, gpus, age=admitted_for, **fields)


def decide(
    nodes: tuple[NodeCapacity, ...] | None, queues: list[Queue], *requests: Workload
) -> Decisions:
    return admit(ClusterState(nodes=nodes, queues=tuple(queues), workloads=requests), NOW)


def admitted(decisions: Decisions) -> list[str]:
    return sorted(one.uid for one in decisions.grants)
