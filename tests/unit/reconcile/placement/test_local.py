"""Node-local checkpoints: the nodes of the first gang and of later gangs."""

from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import Node
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Plan
from world import World, make_job, make_queue

LOCAL = {"checkpoints": {"hostPath": "/var/lib/checkpoints/", "size": "10Gi"}}
GI = 2**30


class Cluster(World):
    """Nodes with local storage."""

    promised: dict[str, int]

    def __init__(self, nodes: int, queue: dict[str, Any] | None = None, **spec: Any) -> None:
        super().__init__(
            make_job(numNodes=nodes, **spec), make_queue(**(queue or {"storage": LOCAL}))
        )
        self.promised = {}

    def observed(self) -> Observed:
        seen = super().observed()
        return replace(seen, cluster=replace(seen.cluster, promised=self.promised))

    def storage(self, name: str, size: str, ready: bool = True, **labels: str) -> None:
        self.node(name, ready, hostname=f"{name}.local")
        assert self.nodes is not None
        node: Node = self.nodes[name]
        self.nodes[name] = replace(
            node,
            metadata=replace(node.metadata, labels=node.metadata.labels | labels),
            status=replace(node.status, allocatable={"ephemeral-storage": size}),
        )

    def template(self, plan: Plan) -> dict[str, Any]:
        body: Any = next(a.body for a in plan.applies if a.kind.kind == "Job")
        template: dict[str, Any] = body["spec"]["template"]
        return template


def wishes(template: dict[str, Any]) -> list[tuple[int, str, list[str]]]:
    affinity = template["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    expressions = [(term["weight"], term["preference"]["matchExpressions"][0]) for term in terms]
    return [(weight, e["operator"], e["values"]) for weight, e in expressions]


def test_the_directory_belongs_to_the_job_and_needs_no_claim():
    world = Cluster(2)
    world.storage("a", "100Gi")
    template = world.template(world.plan())
    assert {"name": "checkpoints", "mountPath": "/checkpoints"} in template["spec"]["containers"][
        0
    ]["volumeMounts"]
    directory = {"path": "/var/lib/checkpoints/ml/train", "type": "DirectoryOrCreate"}
    assert {"name": "checkpoints", "hostPath": directory} in template["spec"]["volumes"]
    assert template["metadata"]["annotations"]["torchrun.ai/local-checkpoints"] == str(10 * GI)
    assert [a.kind.kind for a in world.plan().applies] == ["Secret", "Job", "Service"]


@pytest.mark.parametrize(
    ("nodes", "rooms", "promised", "chosen"),
    [
        (1, {"a": "50Gi", "b": "100Gi"}, {}, ["b"]),
        (1, {"a": "50Gi", "b": "100Gi"}, {"b": 60 * GI}, ["a"]),
        (2, {"a": "50Gi", "b": "100Gi", "c": "95Gi"}, {}, ["b", "c"]),
        (2, {"a": "50Gi", "b": "100Gi"}, {}, ["b"]),
        (3, {"a": "85Gi", "b": "100Gi"}, {}, ["a", "b"]),
        (1, {"a": "50Gi", "b": "50Gi"}, {}, ["a"]),
        (1, {"a": "1Gi", "b": "much"}, {}, ["a"]),
    ],
)
def test_the_greedy_rule(nodes, rooms, promised, chosen):
    world = Cluster(nodes)
    for name, size in rooms.items():
        world.storage(name, size)
    world.promised = promised
    expected = [(20, "In", [f"{name}.local" for name in chosen])]
    assert wishes(world.template(world.plan())) == expected


def test_unschedulable_nodes_are_not_preferred():
    world = Cluster(1, scheduling={"nodeSelector": {"pool": "gpu"}})
    world.storage("lost", "900Gi", ready=False, pool="gpu")
    world.storage("elsewhere", "800Gi")
    world.storage("cordoned", "700Gi", pool="gpu")
    world.storage("right", "1Gi", pool="gpu")
    assert world.nodes is not None
    cordoned = world.nodes["cordoned"]
    world.nodes["cordoned"] = replace(cordoned, spec=replace(cordoned.spec, unschedulable=True))
    assert wishes(world.template(world.plan())) == [(20, "In", ["right.local"])]


def test_without_nodes_there_is_no_preference():
    assert wishes(Cluster(1).template(Cluster(1).plan())) == []


def test_a_new_gang_prefers_its_previous_nodes():
    world = Cluster(2)
    for name in ("a", "b", "c"):
        world.storage(name, "100Gi")
    world.settle()
    for worker, node in zip(world.workers(), ("b", "c"), strict=True):
        world.place(worker.metadata.name, node)
    world.all_workers("Running")
    world.settle()
    assert world.job.status.checkpoint_nodes == ("b", "c")
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    again = next(plan for plan in reversed(world.plans) if plan.applies)
    assert wishes(world.template(again)) == [
        (100, "In", ["b.local", "c.local"]),
        (20, "In", ["a.local"]),
    ]
    world.place(world.workers()[0].metadata.name, "a")
    world.settle()
    assert world.job.status.checkpoint_nodes == ("b", "c"), (
        "a gang that never ran has no checkpoint"
    )


def test_a_suspension_keeps_the_preferred_nodes():
    world = Cluster(1)
    world.storage("a", "100Gi")
    world.storage("b", "200Gi")
    world.settle()
    world.place(world.workers()[0].metadata.name, "a")
    world.all_workers("Running")
    world.settle()
    world.suspend()
    assert (world.phase, world.job.status.checkpoint_nodes) == ("Suspended", ("a",))
    world.spec(suspend=False)
    assert wishes(world.template(world.plan()))[0] == (100, "In", ["a.local"])


@pytest.mark.parametrize(
    ("queue", "job", "local"),
    [
        ({"hostPath": "/q"}, {"claimName": "mine"}, ""),
        ({"claimName": "shared"}, {"hostPath": "/j"}, "/j/ml/train"),
        ({"hostPath": "/q"}, {"mountPath": "/c"}, "/q/ml/train"),
        ({"hostPath": "/q"}, {"enabled": False}, ""),
    ],
)
def test_nearer_nodes_have_higher_weights(queue, job, local):
    world = Cluster(1, {"storage": {"checkpoints": queue}}, volumes={"checkpoints": job})
    volumes = world.template(world.plan())["spec"]["volumes"]
    paths = [v["hostPath"]["path"] for v in volumes if "hostPath" in v]
    assert paths == ([local] if local else [])
