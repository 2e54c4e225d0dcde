"""Lost machines: which nodes are lost, since when, and the replacement of the gang."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import (
    Node,
    NodeCondition,
    NodeMeta,
    NodeSpec,
    NodeStatus,
    Pod,
    PodSpec,
    PodStatus,
    Taint,
)
from torchrun_api.kinds.meta import ChildMeta, Condition, ConditionStatus
from torchrun_controller.reconcile.pods import nodes
from unit.reconcile.losing import OUT_OF_SERVICE, begin, running
from world import World

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_node_that_is_not_ready_gets_time_to_return():
    world = running()
    world.node("node-1", False)
    plan = world.settle()
    assert (world.phase, plan.requeue_after) == ("Running", 40)
    world.pass_time(seconds=39)
    assert world.settle().requeue_after == 1
    world.node("node-1")
    world.pass_time(seconds=3600)
    assert world.settle().requeue_after is None
    assert (world.phase, world.job.status.attempt) == ("Running", 0)


def test_a_lost_node_is_a_disruption_with_a_new_gang():
    world = running(maxRestarts=0)
    world.node("node-1", False)
    world.pass_time(seconds=40)
    plan = world.step()
    assert not plan.applies
    assert [(delete.name, delete.collection) for delete in plan.deletes] == [("train", True)]
    assert [worker.node for worker in world.job.status.unfenced] == ["node-1"], (
        "the status is written first"
    )
    world.pass_backoff()
    assert [apply.name for apply in world.step().applies][1:] == ["train-r1"]
    status = world.job.status
    assert (status.attempt, status.restarts, status.disruptions) == (1, 0, 1)
    assert status.last_failure is not None
    assert (status.last_failure.reason, status.last_failure.node) == ("NodeLost", "node-1")
    message = "Machine node-1 of pod train-1-abcde is NotReady since 2026-01-02T03:04:05Z."
    assert status.last_failure.message == message
    assert world.job.status.message.count("node-1") == 1, "named once"
    assert status.attempts[-1].node == "node-1"


def test_a_deleted_node_is_lost_after_a_delay():
    world = running()
    pod = world.workers()[1]
    placed = Condition(type="PodScheduled", status="True", last_transition_time=world.now)
    world.pod(pod.metadata.name, conditions=(placed,))
    assert world.nodes is not None
    del world.nodes["node-1"]
    assert world.settle().requeue_after == 40, "the watch of nodes may lag"
    world.pass_time(seconds=40)
    world.settle()
    assert world.job.status.attempt == 1
    assert world.job.status.last_failure is not None
    assert "was deleted" in world.job.status.last_failure.message


def test_an_out_of_service_node_is_lost_at_once_and_fenced():
    world = running()
    world.node("node-1", True, OUT_OF_SERVICE)
    world.settle()
    world.containers_stop()
    assert world.job.status.attempt == 1
    assert world.job.status.unfenced == ()
    begin(world)


def test_without_a_view_of_nodes_no_node_is_lost():
    world = running()
    world.nodes = None
    world.pass_time(seconds=3600)
    assert world.settle().requeue_after is None
    assert world.phase == "Running"


def test_a_node_without_a_ready_condition_is_not_lost():
    world = running()
    assert world.nodes is not None
    bare = replace(
        world.nodes["node-1"], status=replace(world.nodes["node-1"].status, conditions=())
    )
    world.nodes = world.nodes | {"node-1": bare}
    world.pass_time(seconds=3600)
    world.settle()
    assert world.phase == "Running"


def node_with(name: str, ready: NodeCondition | None, *taints: Taint) -> Node:
    return Node(
        metadata=NodeMeta(name=name),
        spec=NodeSpec(taints=taints),
        status=NodeStatus(conditions=() if ready is None else (ready,)),
    )


def silent_for(seconds: int | None, status: ConditionStatus = "Unknown") -> NodeCondition:
    since = None if seconds is None else NOW - timedelta(seconds=seconds)
    return NodeCondition(type="Ready", status=status, last_transition_time=since)


@pytest.mark.parametrize("taints", [(), (Taint(key=OUT_OF_SERVICE),)], ids=["", "out-of-service"])
@pytest.mark.parametrize(
    "ready",
    [
        None,
        *(silent_for(0, "True"), silent_for(3600, "True")),
        *(silent_for(0), silent_for(39, "False"), silent_for(40, "False"), silent_for(3600)),
        *(silent_for(-5), silent_for(None)),
    ],
)
def test_admission_and_jobs_agree_on_lost_nodes(
    ready: NodeCondition | None, taints: tuple[Taint, ...]
) -> None:
    node = node_with("node-1", ready, *taints)
    pod = Pod(metadata=ChildMeta(name="train-0-abcde"), spec=PodSpec(node_name="node-1"))
    by_name = {"node-1": node}
    is_lost = nodes.find_loss(by_name, pod, NOW) is not None
    lost_nodes, wait = nodes.find_lost_nodes([node], NOW)
    assert lost_nodes == (frozenset(by_name) if is_lost else frozenset())
    assert wait == nodes.next_loss(by_name, [pod], NOW)


def test_admission_waits_for_the_next_of_several_nodes() -> None:
    ready_nodes = [node_with(f"ready-{number}", silent_for(3600, "True")) for number in range(3)]
    silent_nodes = [node_with(f"node-{age}", silent_for(age)) for age in (10, 30, 50)]
    assert nodes.find_lost_nodes([*ready_nodes, *silent_nodes], NOW) == ({"node-50"}, 10)


SWITCHED_OFF = range(10_000, 90_000, 10_000)  # nobody has removed their Node objects


# Seconds since machines fell silent or, in "ready", since they were Ready; then how many are lost.
@pytest.mark.parametrize(
    ("silent", "ready", "lost_count"),
    [
        ([90] * 3, [], 0),
        ([90] * 2, [], 2),
        ([90] * 3, [3600] * 2, 0),
        ([90] * 5, [3600] * 4, 0),
        ([90] * 11, [3600] * 9, 11),
        ([90] * 12, [3600] * 9, 0),
        ([50, 60, 70, 80, 90], [3600], 0),
        ([150, 120, 90, 60], [3600], 0),
        ([600, 400, 200, 90], [3600], 4),
        ([*SWITCHED_OFF, 90, 90], [3600], 10),
        ([*SWITCHED_OFF, 90, 90, 90], [3600], 8),
        ([86400] * 9 + [90], [3600] * 2, 1),
        ([90], [20, 30, 70], 0),
        ([90], [30, 30, 3600], 0),
        ([90], [50, 60, 70], 1),
        ([90], [30, 3600, 3600], 1),
        ([130] * 2, [50, 60], 2),
    ],
)
def test_machines_that_fall_silent_together_are_not_lost(
    silent: list[int], ready: list[int], lost_count: int
) -> None:
    silent_nodes = [node_with(f"s-{n}", silent_for(age)) for n, age in enumerate(silent)]
    ready_nodes = [node_with(f"r-{n}", silent_for(age, "True")) for n, age in enumerate(ready)]
    lost_nodes, _ = nodes.find_lost_nodes([*ready_nodes, *silent_nodes], NOW)
    assert len(lost_nodes) == lost_count


def four_silent_machines() -> World:
    world = running(4)
    for number in range(4):
        world.node(f"node-{number}", False)
    world.pass_time(seconds=90)
    return world


def test_a_gang_outlives_the_silence_of_most_machines() -> None:
    world = four_silent_machines()
    assert world.settle().requeue_after == 40
    assert (world.phase, len(world.gangs)) == ("Running", 1)
    assert "node-0 and 3 more" in (world.job.status.message or "")


@pytest.mark.parametrize("confirm", ["out-of-service", "deleted", "peer failed", "recovered"])
def test_one_of_many_silent_machines_counts_as_lost_once_that_is_confirmed(confirm: str) -> None:
    world = four_silent_machines()
    world.settle()
    assert world.nodes is not None
    if confirm == "out-of-service":
        world.node("node-1", False, OUT_OF_SERVICE)
    elif confirm == "deleted":
        del world.nodes["node-1"]
    elif confirm == "peer failed":
        world.node("node-0")
        world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
        world.pod(world.workers()[0].metadata.name, phase="Failed")
    else:
        for number in (0, 2, 3):
            world.node(f"node-{number}")
    world.settle()
    if confirm == "recovered":
        assert world.phase == "Running", "it may follow the others"
        world.pass_time(seconds=40)
        world.settle()
    assert len(world.job.status.attempts) == 1


@pytest.mark.parametrize(("seconds", "is_lost"), [(0, False), (39, False), (40, True)])
def test_a_node_that_got_a_pod_after_its_silence_may_be_back(seconds: int, is_lost: bool) -> None:
    """The scheduler avoids silent nodes, so the view of the node is older than the pod."""
    placed = Condition(
        type="PodScheduled", status="True", last_transition_time=NOW - timedelta(seconds=seconds)
    )
    pod = Pod(
        metadata=ChildMeta(name="train-sync-0"),
        spec=PodSpec(node_name="a"),
        status=PodStatus(conditions=(placed,)),
    )
    view = {"a": node_with("a", silent_for(600))}
    assert (nodes.find_loss(view, pod, NOW) is not None) == is_lost
