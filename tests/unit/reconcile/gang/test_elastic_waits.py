"""Elastic jobs that have waited for long, such as for Kueue, before their first pod has a node."""

from torchrun_api.kinds.resources import JOBS
from torchrun_controller.reconcile.gang.elastic import SHRINK_AFTER
from unit.reconcile.gang.test_elastic import FULL, elastic, place, suspend_for_an_hour
from world import World


def assert_shrinks_after_the_delay(world: World, nodes: int) -> None:
    """The gang waits for the whole delay from now on, and then has this many nodes."""
    attempt = world.job.status.attempt
    world.settle()
    world.pass_time(seconds=SHRINK_AFTER.total_seconds() - 1)
    world.settle()
    assert world.job.status.attempt == attempt
    assert world.condition("FullSize").reason == "NodesMissing"
    world.pass_time(seconds=1)
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (attempt + 1, nodes)


def test_the_time_of_a_suspended_job_does_not_count():
    world = elastic()
    world.objects[JOBS.plural, "train"] = suspend_for_an_hour(world)
    world.settle()
    place(world, 1)
    assert_shrinks_after_the_delay(world, 1)


def test_the_time_without_any_node_does_not_count():
    world = elastic()
    world.not_placed(FULL, 0, 1, 2)
    world.settle()
    assert world.condition("FullSize").reason == "NodesMissing"
    world.pass_time(hours=1)
    world.settle()
    world.placed("train-0-abcde")
    assert_shrinks_after_the_delay(world, 1)


def test_the_time_counts_from_the_last_pod_that_got_a_node():
    world = elastic()
    place(world, 1)
    world.pass_time(seconds=20)
    place(world, 2)
    assert_shrinks_after_the_delay(world, 2)
