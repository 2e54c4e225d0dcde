"""Elastic jobs with admission: the size of a gang never depends on nodes that are not admitted."""

from msgspec.structs import replace

from admitting import running, submitted
from torchrun_controller.reconcile.gang.elastic import SHRINK_AFTER
from unit.reconcile.gang.test_elastic import place
from world import World


def elastic(fewest: int = 1) -> dict[str, object]:
    return {"numNodes": 4, "elastic": {"minNodes": fewest, "maxNodes": 16}}


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
