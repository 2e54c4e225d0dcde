"""A controller that has not read the nodes yet, although it may, decides nothing that needs them."""

import pytest

from torchrun_api.kinds import JOBS
from unit.reconcile import losing
from unit.reconcile.replacing import (
    REPORTING,
    counts,
    place,
    replace_lost,
    run,
    running,
    start,
    stop,
)
from world import World, make_job, make_queue


def forget_nodes(world: World) -> dict[str, object]:
    """The watch of nodes is dead, or the controller has just started."""
    nodes, world.nodes, world.nodes_awaited = world.nodes, None, True
    assert nodes is not None
    return nodes


def submitted(**spec: object) -> World:
    world = World(make_job(**{"numNodes": 2, **spec}), make_queue())
    world.defaults = REPORTING
    world.nodes_awaited = True
    return world


def test_a_gang_that_is_to_replace_pods_waits_for_the_nodes():
    world = submitted(reliability={"podReplacement": "Pod"})
    plan = world.settle()
    assert (world.phase, world.job.status.reason, world.gangs) == ("Queued", "NodesNotRead", [])
    assert plan.requeue_after == 10
    assert not any(c.type == "NotYetSupported" for c in world.job.status.conditions)
    world.nodes, world.nodes_awaited = {}, False
    world.settle()
    assert [gang.metadata.annotations.pod_replacement for gang in world.gangs] == ["Pod"]


def test_a_controller_that_may_not_read_nodes_does_not_wait_for_them():
    world = submitted(reliability={"podReplacement": "Pod"})
    world.settle()
    world.nodes_awaited = False
    world.settle()
    assert [gang.metadata.annotations.pod_replacement for gang in world.gangs] == [""]


def test_another_first_gang_does_not_wait_for_the_nodes():
    world = submitted()
    world.settle()
    assert len(world.gangs) == 1


def test_a_gang_replaces_pods_while_the_nodes_are_awaited():
    world = running()
    nodes = forget_nodes(world)
    stop(world, 1)
    replace_lost(world)
    place(world, 1)
    assert start(world, 1) == "0/1"
    run(world)
    assert (world.phase, counts(world)) == ("Running", (0, 0, 1))
    world.nodes, world.nodes_awaited = nodes, False
    world.settle()
    assert (world.phase, counts(world)) == ("Running", (0, 0, 1))


def test_the_status_has_the_node_of_a_pod_that_starts_while_the_nodes_are_awaited():
    world = running()
    nodes = forget_nodes(world)
    stop(world, 1)
    replace_lost(world)
    world.place(world.workers()[1].metadata.name, "node-3")
    world.settle()
    assert start(world, 1) == "0/1"
    assert world.job.status.worker_nodes == ("node-0", "node-3", "node-2")
    world.vanish(world.workers()[1].metadata.name)
    world.settle()
    del nodes["node-3"]
    world.nodes, world.nodes_awaited = nodes, False
    world.settle()
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-3")]


def lose_unseen(world: World) -> dict[str, object]:
    """A Node and its pod vanish, and the Job fails, while the nodes are awaited."""
    nodes = forget_nodes(world)
    del nodes["node-1"]
    world.vanish("train-1-abcde")
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    world.containers_stop()
    world.pass_time(minutes=2)
    world.settle()
    return nodes


def test_a_gang_that_follows_another_waits_until_lost_nodes_are_known():
    world = losing.running()
    nodes = lose_unseen(world)
    assert (world.job.status.reason, len(world.gangs)) == ("NodesNotRead", 1)
    assert world.job.status.worker_nodes == ("node-0", "node-1")
    world.nodes, world.nodes_awaited = nodes, False
    world.settle()
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-1")]
    assert world.job.status.reason == "WaitingForFence"


def test_a_job_that_allows_an_unfenced_restart_does_not_wait_for_the_nodes():
    world = losing.running(allowUnfencedRestart=True)
    lose_unseen(world)
    assert len(world.gangs) == 2


def test_the_memory_of_an_earlier_attempt_is_not_that_of_the_present_one():
    world = losing.running()
    world.pod("train-0-abcde", phase="Failed")
    world.pass_backoff()
    world.step(writes=1)  # the process dies before it writes a status
    assert len(world.gangs) == 2
    forget_nodes(world)
    world.settle()
    assert (world.job.status.attempt, world.job.status.worker_nodes) == (1, ())


# A gang that was created without the replacement of pods


def warning(world: World) -> str:
    conditions = world.job.status.conditions
    return next((c.message for c in conditions if c.type == "NotYetSupported"), "")


@pytest.fixture
def without_replacement() -> World:
    """The controller could not read nodes when it created the gang. Now it can."""
    world = submitted(reliability={"podReplacement": "Pod"})
    world.nodes_awaited = False
    world.settle()
    for index in range(3):
        world.node(f"node-{index}")
    run(world)
    assert world.phase == "Running"
    return world


def test_a_gang_says_that_it_does_not_replace_pods(without_replacement):
    world = without_replacement
    assert "the present gang" in warning(world)
    assert world.objects[JOBS.plural, "train"].metadata.annotations.pod_replacement == ""


def test_the_next_gang_does_not_say_so(without_replacement):
    world = without_replacement
    stop(world, 1)
    assert len(world.gangs) == 2
    assert warning(world) == ""


def test_a_gang_of_one_node_has_no_pods_to_replace_alone():
    world = submitted(numNodes=1, reliability={"podReplacement": "Pod"})
    world.settle()
    assert len(world.gangs) == 1
    world.nodes_awaited = False
    world.node("node-0")
    run(world)
    assert warning(world) == ""
