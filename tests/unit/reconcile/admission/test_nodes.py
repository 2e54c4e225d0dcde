"""Nodes, taints and queues in the state of the coordinator."""

import msgspec
import pytest
from msgspec.structs import replace

from torchrun_api.kinds import core
from torchrun_api.kinds.admission import QueueAdmission
from torchrun_controller.reconcile.admission import nodes as node_rules
from torchrun_controller.reconcile.admission.classify import Classification
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob, cluster_state, queue_input
from torchrun_controller.reconcile.admission.model import (
    Amounts,
    NodeCapacity,
    QueueSummary,
    QuotaLimits,
    RoundRobinState,
    Workload,
)
from torchrun_controller.reconcile.admission.statuses import queue_updates
from world import START, make_job, make_queue

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
TEAM_TAINT = {"key": "team", "value": "vision", "effect": "NoExecute"}


def a_node(name: str = "n", *taints: object, ready: str = "True", **spec: object) -> core.Node:
    body = {
        "metadata": {"name": name, "labels": {"zone": "a"}},
        "spec": {"taints": list(taints), **spec},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}] if ready else [],
            "allocatable": {"cpu": "1500m", "memory": "1Ki", "pods": "10", "odd": "many"},
        },
    }
    return msgspec.convert(body, core.Node)


def seen(node: core.Node) -> NodeCapacity:
    return node_rules.node_capacity(node, node_rules.find_taints([node]))


def test_what_other_pods_use_is_subtracted():
    overhead = node_rules.parse_overhead(" cpu=0.5, memory=1Ki,,pods=20 ")
    assert overhead == {"cpu": 500, "memory": 1024, "pods": 20}
    capacity = node_rules.node_capacity(a_node(), frozenset(), overhead)
    assert capacity.allocatable == {"cpu": 1000, "memory": 0, "pods": 0}
    assert node_rules.parse_overhead("") == {}


@pytest.mark.parametrize("text", ["cpu", "=1", "cpu=", "cpu=many", "cpu=1,cpu=2"])
def test_an_invalid_overhead_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 only settings.py has a message
        node_rules.parse_overhead(text)


def test_amounts_in_whole_numbers():
    node = seen(a_node())
    assert node.allocatable == {"cpu": 1500, "memory": 1024, "pods": 10}
    assert node.labels == {"zone": "a"}
    assert node.usable


@pytest.mark.parametrize(
    "node",
    [
        a_node(ready="False"),
        a_node(ready=""),
        a_node("n", unschedulable=True),
        a_node("n", {"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}),
    ],
)
def test_unusable_nodes(node):
    assert not seen(node).usable


def test_a_prefer_no_schedule_taint_is_ignored():
    node = a_node("n", {"key": "node.kubernetes.io/x", "effect": "PreferNoSchedule"})
    assert seen(node).usable
    assert node_rules.find_taints([node]) == frozenset()


@pytest.mark.parametrize(
    ("toleration", "lets_in"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "value": "vision"}, True),
        ({"key": "team", "value": "vision", "effect": "NoExecute"}, True),
        ({"key": "team", "value": "vision", "effect": "NoSchedule"}, False),
        ({"key": "team", "value": "speech"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({}, False),
    ],
)
def test_tolerations(toleration, lets_in):
    taints = node_rules.find_taints([a_node("n", TEAM_TAINT)])
    assert (node_rules.taint_selector(taints, (toleration,), ()) == {}) is lets_in


def test_taints_become_node_labels():
    nodes = (a_node("kept", TEAM_TAINT), a_node("open"))
    queue = make_queue(quota={"nodes": 1})
    workload = Workload(
        namespace="ml", name="j", uid="u", queue="gpu", created=START, nodes=1, pod={"pods": 1}
    )
    classification = Classification(takes_part=True, workload=workload)
    entries = [
        ClassifiedJob(make_job(), classification),
        ClassifiedJob(make_job(), classification),
        ClassifiedJob(make_job(), replace(classification, tolerations=({"operator": "Exists"},))),
    ]
    state = cluster_state([queue], entries, (), nodes, START)
    (key,) = set(state.nodes[0].labels) - {"zone"}
    assert [node.labels[key] for node in state.nodes] == ["present", "absent"]
    assert [r.node_selector for r in state.workloads] == [{key: "absent"}, {key: "absent"}, {}]


def test_each_taint_repels_the_jobs_that_do_not_tolerate_it():
    nodes = (a_node("gpu", GPU_TAINT), a_node("team", TEAM_TAINT))
    taints = node_rules.find_taints(nodes)
    selector = node_rules.taint_selector(taints, ({"key": "team", "operator": "Exists"},), ())
    labels = [node_rules.node_capacity(node, taints).labels for node in nodes]
    assert [selector.items() <= each.items() for each in labels] == [False, True]


def test_a_taint_of_a_requested_device_is_tolerated():
    taints = node_rules.find_taints([a_node("n", GPU_TAINT)])
    assert node_rules.taint_selector(taints, (), {"pods": 1, "nvidia.com/gpu": 8}) == {}
    assert node_rules.taint_selector(taints, (), {"pods": 1}) != {}


def test_heartbeats_change_nothing():
    assert node_rules.relevant_fields(a_node()) == node_rules.relevant_fields(a_node())
    assert node_rules.relevant_fields(a_node()) != node_rules.relevant_fields(a_node(ready="False"))
    assert node_rules.relevant_fields(None) is None


class TestQueues:
    def test_quotas_in_whole_numbers(self):
        quota = {"nodes": 4, "gpus": 32, "cpu": "1500m", "memory": "1Ki", "jobs": 2}
        queue = queue_input(make_queue(quota=quota, weight=3, cohort="lab"))
        assert queue.quota == QuotaLimits(nodes=4, gpus=32, cpu=1500, memory=1024, jobs=2)
        assert (queue.weight, queue.cohort, queue.paused_reason, queue.round_robin) == (
            3,
            "lab",
            "",
            None,
        )

    def test_without_quota_nothing_is_limited(self):
        assert queue_input(make_queue(weight=1)).quota == QuotaLimits()

    def test_an_unreadable_or_terminating_queue_is_paused(self):
        assert "spec.quota" in queue_input(make_queue(quota={"cpu": "many"})).paused_reason
        going = msgspec.structs.replace(
            make_queue(),
            metadata=msgspec.structs.replace(make_queue().metadata, deletion_timestamp=START),
        )
        assert queue_input(going).paused_reason == "The queue is being deleted."

    def account(self, **fields: object) -> QueueAdmission:
        summary = QueueSummary(
            namespace="ml",
            name="gpu",
            round_robin=RoundRobinState(weight=2, current=-3),
            **fields,
        )
        (update,) = queue_updates([make_queue()], (summary,))
        assert update.status.admission is not None
        return update.status.admission

    def test_the_account(self):
        found = self.account(
            used=Amounts(nodes=2, gpus=16, cpu=1500, memory=2048, jobs=1),
            free=QuotaLimits(gpus=16, jobs=0, cpu=0, memory=0),
        )
        assert found.summary == "16/32 GPUs"
        assert found.used == {"nodes": 2, "gpus": 16, "jobs": 1, "cpu": "1500m", "memory": "2Ki"}
        assert found.free == {"gpus": 16, "jobs": 0, "cpu": "0", "memory": "0"}
        assert (found.weight, found.current) == (2, -3)

    def test_an_unused_queue_has_an_empty_account(self):
        found = self.account()
        assert (found.used, found.borrowed) == ({}, {})

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            (
                {
                    "used": Amounts(nodes=6),
                    "free": QuotaLimits(nodes=0),
                    "borrowed": Amounts(nodes=2),
                },
                "6/4 nodes",
            ),
            ({"used": Amounts(jobs=1), "free": QuotaLimits(jobs=2)}, "1/3 jobs"),
            ({"used": Amounts(nodes=1, gpus=8)}, "8 GPUs"),
            ({"used": Amounts(nodes=1)}, "1 nodes"),
        ],
    )
    def test_its_summary(self, fields, text):
        assert self.account(**fields).summary == text

    def test_only_changes_of_the_account_are_written(self):
        queue = make_queue(quota={"nodes": 4})
        summary = QueueSummary(
            namespace="ml", name="gpu", round_robin=RoundRobinState(weight=1, current=5)
        )
        (word,) = queue_updates([queue], (summary,))
        queue = msgspec.structs.replace(queue, status=word.status)
        assert queue_updates([queue], (summary,)) == []
        assert queue_input(queue).round_robin == RoundRobinState(weight=1, current=5)
        (word,) = queue_updates([queue], ())
        assert word.status.admission is None
