"""Fences of a gang that replaces pods: which workers it fences, and how often."""

import pytest

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
from world import ZIP, World, make_job, make_queue


@pytest.fixture
def fencing() -> World:
    """The second gang runs, and its launchers fence a worker of the first one."""
    spec = {"numNodes": 3, "volumes": ZIP, "reliability": {"podReplacement": "Pod"}}
    world = World(make_job(**spec), make_queue())
    world.defaults = REPORTING
    for index in range(6):
        world.node(f"node-{index}")
    world.step()
    world.sync_done()
    world.settle()
    run(world)
    losing.lose(world, "node-2")
    world.containers_stop()
    for index, pod in enumerate(world.workers()):
        world.place(pod.metadata.name, f"node-{index + 3}")
        world.pod(pod.metadata.name, phase="Running")
    world.settle_twice()
    assert (world.phase, world.job.status.reason) == ("Queued", "Fencing")
    return world


def replace_leader(world: World) -> None:
    stop(world, 0)
    replace_lost(world)
    place(world, 0)
    assert start(world, 0) == "1/1"
    run(world)


def test_a_gang_that_has_run_does_not_fence_again(fencing):
    world = fencing
    world.pass_time(seconds=50)
    world.settle()
    assert world.phase == "Running"
    world.pass_time(seconds=60)
    replace_leader(world)
    assert (world.phase, world.job.status.reason) == ("Running", "WorkersRunning")
    assert counts(world) == (1, 0, 2)


@pytest.mark.parametrize("index", [0, 2])
def test_no_gate_opens_before_the_status_has_the_node(index):
    """The pod may vanish with its Node object: then only the status has where it may run."""
    world = running()
    stop(world, index)
    replace_lost(world)
    assert start(world, index) == "", "it has no node"
    world.place(world.workers()[index].metadata.name, "node-3")
    plan = world.step(writes=99)  # the process dies before it writes the status
    assert plan.status is not None
    assert plan.status.worker_nodes[index] == "node-3"
    world.step()
    assert start(world, index) == "", "the status has its node since this step"
    world.step()
    assert start(world, index) == "0/1"
    assert world.job.status.worker_nodes[index] == "node-3"


def test_a_gate_opens_on_the_node_of_the_pod_before():
    world = running()
    stop(world, 1)
    replace_lost(world)
    place(world, 1)
    assert start(world, 1) == "0/1"
    assert world.job.status.worker_nodes == ("node-0", "node-1", "node-2")


def test_a_gate_opens_beside_an_unfenced_restart():
    world = running(reliability={"allowUnfencedRestart": True})
    stop(world, 1)
    replace_lost(world)
    place(world, 1)
    assert start(world, 1) == "0/1"


def test_a_new_pod_that_vanishes_with_its_node_is_fenced():
    world = running()
    stop(world, 1)
    replace_lost(world)
    world.place(world.workers()[1].metadata.name, "node-3")
    world.settle()
    assert start(world, 1) == "0/1"
    world.vanish(world.workers()[1].metadata.name)
    del world.nodes["node-3"]
    world.settle()
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-3")]


def test_a_new_pod_on_a_silent_node_is_fenced_once_it_may_start():
    world = running()
    stop(world, 1)
    replace_lost(world)
    world.place(world.workers()[1].metadata.name, "node-3")
    world.step()
    assert world.job.status.worker_nodes[1] == "node-3"
    world.node("node-3", False)
    world.step()
    assert world.job.status.unfenced == (), "the pod is there, and had no start"
    world.settle()
    assert start(world, 1) == "0/1"
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-3")]


def test_a_worker_is_fenced_although_the_new_leader_waits_for_its_start():
    """The worker has started with the leader before."""
    world = running()
    stop(world, 0)
    replace_lost(world)
    assert start(world, 0) == "", "it has no node"
    world.node("node-1", False)
    world.settle()
    assert [(w.index, w.node) for w in world.job.status.unfenced] == [(1, "node-1")]
