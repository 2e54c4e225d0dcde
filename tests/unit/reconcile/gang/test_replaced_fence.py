"""Fences of a gang that replaces pods: each gang fences the older ones once."""

import pytest

from unit.reconcile import losing
from unit.reconcile.replacing import REPORTING, counts, replace_lost, run, start, stop
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
