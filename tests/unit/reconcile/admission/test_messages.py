"""The message of a waiting workload."""

from math import inf

import pytest

from queueing import NOW, admitted, admitted_workload, decide, node, nodes, queue, request
from torchrun_controller.reconcile.admission import messages
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import ClusterState


def test_the_head_names_the_shortage_and_others_wait():
    asked = [request(f"j{i:03}", "research", 2, age=999 - i) for i in range(30)]
    pending = decide(
        nodes(2), [queue("research")], admitted_workload("x", "research"), *asked
    ).pending
    assert pending["j000"].message == (
        "The job needs 16 GPUs on 2 nodes. Machines that are ready have room for 1 of 2 pods."
    )
    assert {pending[f"j{i:03}"].message for i in range(1, 30)} == {
        "Waiting behind other jobs in queue research."
    }
    assert [pending[f"j{i:03}"].position for i in range(30)] == list(range(1, 31))


def test_messages_stay_while_others_start():
    asked = tuple(request(f"j{i:03}", "a", age=999 - i) for i in range(60))
    before = admit(ClusterState(nodes=nodes(1), queues=(queue("a"),), workloads=asked), NOW)
    after = admit(ClusterState(nodes=nodes(1), queues=(queue("a"),), workloads=asked[3:]), NOW)
    changed = [
        r.uid for r in asked[4:] if before.pending[r.uid].message != after.pending[r.uid].message
    ]
    assert changed == ["j004"]


def test_a_head_without_room_in_its_quota_promises_no_time_while_others_stop():
    # It also lacks nodes, so it is not nominated.
    running = [
        admitted_workload("stops", "a", preempted_for="deleted", pods_by_node={"n000": 1}),
        admitted_workload("other", "b", pods_by_node={"n001": 1}),
    ]
    queues = [queue("a", quota={"gpus": 16}), queue("b")]
    status = decide(nodes(2), queues, *running, request("j", "a", 2)).pending["j"]
    assert status.reason == "InsufficientQuota"
    assert status.message.endswith("The quota of queue a has 8 GPUs of 16 GPUs left.")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, ""),
        (1.0, " It starts by 2026-01-01T00:00Z at the latest."),
        (60.0, " It starts by 2026-01-01T00:01Z at the latest."),
        (inf, ""),
    ],
)
def test_the_latest_start_is_a_time_to_come(seconds: float, text: str):
    assert messages.describe_latest_start(NOW, seconds) == text


KINDS = (node("x0", labels={"kind": "x"}), node("y0", labels={"kind": "y"}))
ON_Y = {"pods_by_node": {"y0": 1}, "node_selector": {"kind": "y"}}


def test_a_head_that_lacks_quota_promises_no_time():
    """Nobody knows who gets the quota that the other job returns."""
    returns = admitted_workload(
        "returns", "a", pods_by_node={"x0": 1}, node_selector={"kind": "x"}, seconds_left=120.0
    )
    head = request("head", "a", node_selector={"kind": "y"})
    message = decide(KINDS, [queue("a", quota={"gpus": 8})], returns, head).pending["head"].message
    assert message.endswith("The quota of queue a has 0 GPUs of 8 GPUs left.")


SHARES = (("a", 9), ("b", 1))


def test_a_head_promises_no_time_if_its_quota_goes_to_another_queue():
    """Its nodes are reserved, and another queue of the cohort borrows the quota without an end."""
    queues = [queue(name, weight, quota={"gpus": 8}, cohort="c") for name, weight in SHARES]
    holds = admitted_workload("holds", "z", seconds_left=60.0, **ON_Y)
    asked = [
        request("head", "a", 1, 8, node_selector={"kind": "y"}, age=9),
        request("other", "b", 2, 8, node_selector={"kind": "x"}),
    ]
    machines = (*KINDS, node("x1", labels={"kind": "x"}))
    decisions = decide(machines, [*queues, queue("z")], holds, *asked)
    assert admitted(decisions) == ["other"]
    assert decisions.pending["head"].reason == "InsufficientQuota"
    assert "starts" not in decisions.pending["head"].message
