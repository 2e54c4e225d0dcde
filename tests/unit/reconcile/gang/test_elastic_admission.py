"""Elastic jobs with admission: the size of a gang never depends on nodes that are not admitted."""

import pytest
from msgspec.structs import replace

from admitting import running, submitted
from torchrun_controller.reconcile.gang.elastic import SHRINK_AFTER
from unit.reconcile.gang.test_elastic import place
from world import DEFAULTS, World, make_queue


def elastic(fewest: int = 1) -> dict[str, object]:
    return {"numNodes": 4, "elastic": {"minNodes": fewest, "maxNodes": 16}}


def release(world: World, limit: int) -> None:
    """The coordinator asks for the nodes that the gang does not use."""
    admission = replace(world.job.status.admission, limit=limit)
    world.job = replace(world.job, status=replace(world.job.status, admission=admission))
    world.settle()


def shrunk(nodes: int = 2, fewest: int = 1, **spec: object) -> World:
    """A running gang of fewer nodes than the four that are admitted."""
    world = submitted(**elastic(fewest), **spec)
    world.admit(4)
    world.settle()
    shrink(world, nodes)
    return world


def shrink(world: World, nodes: int) -> None:
    """Only some pods are scheduled, so a smaller gang runs."""
    place(world, nodes)
    world.pass_time(seconds=SHRINK_AFTER.total_seconds())
    world.settle()
    world.containers_stop()
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.num_nodes) == ("Running", nodes)


def fail(world: World) -> None:
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    world.containers_stop()
    world.settle()


def test_a_gang_continues_while_more_nodes_are_not_admitted():
    world = running(**elastic())
    world.spec(num_nodes=8)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 0)
    assert world.condition("FullSize").reason == "WaitingForAdmission"
    assert world.job.status.message == (
        "The gang has 4 of 8 nodes. Waiting for the queue to admit more. See the condition"
        " Admitted."
    )
    world.admit(8)
    world.settle()
    assert world.job.status.num_nodes == 8


def test_a_gang_that_fails_keeps_its_size_while_more_nodes_are_not_admitted():
    world = running(**elastic())
    world.spec(num_nodes=8)
    world.settle()
    fail(world)
    assert [gang.spec.completions for gang in world.gangs] == [4, 4]
    world.all_workers("Running")
    world.settle()
    assert world.condition("FullSize").reason == "WaitingForAdmission"


def test_a_gang_whose_job_was_deleted_keeps_its_size_while_more_nodes_are_not_admitted():
    world = running(**elastic())
    world.spec(num_nodes=8)
    world.settle()
    world.delete_child_job()
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (1, 4)


def test_the_first_gang_has_the_size_that_is_admitted():
    world = submitted(**elastic())
    world.admit(4)
    world.spec(num_nodes=8)
    world.settle()
    assert [gang.spec.completions for gang in world.gangs] == [4]


def test_a_gang_below_min_nodes_waits_for_admission():
    world = running(**elastic())
    world.spec(num_nodes=8, elastic=replace(world.job.spec.elastic, min_nodes=6))
    world.settle()
    fail(world)
    assert len(world.gangs) == 1
    assert world.job.status.reason == "WaitingForAdmission"


def test_a_shrunk_gang_that_is_scaled_up_grows_to_what_is_admitted():
    world = shrunk()
    world.spec(num_nodes=8)
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (1, 2)
    world.pass_time(seconds=DEFAULTS.grow_after.total_seconds())
    world.settle()
    assert len(world.observed().gang.probes) == 2


def test_a_shrunk_gang_that_is_scaled_up_releases_nodes():
    world = shrunk()
    world.spec(num_nodes=8)
    world.settle()
    release(world, 2)
    assert world.condition("FullSize").reason == "GivesBackNodes"


def test_a_gang_that_shrinks_further_releases_nodes():
    world = shrunk(3)
    fail(world)
    shrink(world, 2)
    release(world, 3)
    assert world.condition("FullSize").reason == "GivesBackNodes"


def test_a_gang_without_enough_nodes_releases_nodes():
    world = shrunk(3, fewest=2)
    fail(world)
    place(world, 1)
    assert world.condition("FullSize").reason == "NodesMissing"
    release(world, 3)
    assert world.condition("FullSize").reason == "GivesBackNodes"


def test_a_new_gang_releases_nodes():
    world = shrunk(3)
    fail(world)
    assert world.job.status.reason in ("WorkersStarting", "Restarting")
    release(world, 3)
    assert world.condition("FullSize").reason == "GivesBackNodes"


@pytest.mark.parametrize("nodes", [None, 1])
def test_a_gang_whose_resize_waits_releases_nodes(nodes):
    world = shrunk(3)
    if nodes is None:
        fail(world)
        place(world, 2)
    world.queue = make_queue(quota={"nodes": 8}, nodeResources={"memory": "12Gigs"})
    world.pass_time(seconds=SHRINK_AFTER.total_seconds())
    if nodes is not None:
        world.spec(num_nodes=nodes)
    world.settle()
    assert "12Gigs" in world.job.status.message
    release(world, 3)
    assert world.condition("FullSize").reason == "GivesBackNodes"


def test_a_larger_gang_releases_no_nodes():
    """It was created before the controller saw the limit."""
    world = shrunk(3)
    release(world, 2)
    assert world.condition("FullSize").reason == "WaitingForAdmission"
