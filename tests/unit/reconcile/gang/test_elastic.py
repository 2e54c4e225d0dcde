"""Elastic jobs: they shrink when nodes are missing, and ask for all of them again later."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import Job
from torchrun_api.kinds.resources import JOBS
from torchrun_controller.reconcile.gang.elastic import SHRINK_AFTER
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from world import START, World, make_job, make_queue

FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
QUEUE = {"nodeResources": {"gpus": 8, "cpus": 4, "memory": "16Gi"}}


def elastic(nodes: int = 3, fewest: int = 1, most: int = 4, **spec: object) -> World:
    bounds = {"minNodes": fewest, "maxNodes": most}
    world = World(make_job(numNodes=nodes, elastic=bounds, **spec), make_queue(**QUEUE))
    world.settle()
    return world


def place(world: World, count: int) -> None:
    """Schedule the first workers, but not the others."""
    for index, pod in enumerate(world.workers()):
        if index < count:
            world.placed(pod.metadata.name)
        else:
            world.not_placed(FULL, index)
    world.settle()


def shrunk(**spec: object) -> World:
    """A running gang of 2 of 3 nodes."""
    return shrink(elastic(**spec))


def shrink(world: World) -> World:
    """The gang finds two nodes only, and goes on with these."""
    place(world, 2)
    world.pass_time(seconds=SHRINK_AFTER.total_seconds())
    world.settle()
    world.containers_stop()
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert (world.phase, world.job.status.num_nodes) == ("Running", 2)
    return world


def suspend_for_an_hour(world: World) -> Job:
    """Another controller suspends the child Job. Returns the Job from before."""
    child: Job = world.objects[JOBS.plural, "train"]
    world.objects[JOBS.plural, "train"] = replace(child, spec=replace(child.spec, suspend=True))
    world.settle()
    world.pass_time(hours=1)
    world.settle()
    return child


def test_a_gang_without_enough_nodes_shrinks_after_a_delay():
    world = elastic()
    place(world, 2)
    plan = world.plan()
    assert plan.requeue_after == SHRINK_AFTER.total_seconds()
    assert world.job.status.reason == "Unschedulable"
    message = "The gang shrinks to 2 nodes unless all 3 pods are scheduled by 03:04:35 UTC."
    assert message in world.job.status.message
    assert world.condition("FullSize").message == message
    world.pass_time(seconds=29)
    assert world.plan().applies == ()
    world.pass_time(seconds=1)
    plan = world.step()
    assert [(a.kind, a.name) for a in plan.applies][1:] == [(JOBS, "train-r1")]
    assert [event.reason for event in plan.events] == ["Shrinking"]
    assert "After 30 s, 2 of 3 pods are scheduled." in world.job.status.message
    status = world.job.status
    assert (status.num_nodes, status.attempt, status.restarts, status.disruptions) == (2, 1, 0, 0)
    assert [(a.number, a.counted, a.reason) for a in status.attempts] == [(0, False, "Shrinking")]
    assert (JOBS.plural, "train") not in world.objects, "the larger gang is deleted"
    world.settle()
    assert world.job.status.reason == "WaitingForOldGang"


def test_a_gang_of_full_size_says_so():
    world = elastic()
    place(world, 3)
    world.all_workers("Running")
    world.settle()
    assert world.condition("FullSize").message == "The gang has 3 of 3 nodes."
    assert world.condition("FullSize").status == "True"
    assert world.job.status.reason == "WorkersRunning"


def test_a_shrunk_gang_says_when_a_new_one_asks_for_all_nodes():
    world = shrunk()
    condition = world.condition("FullSize")
    assert (condition.status, condition.reason) == ("False", "Shrunk")
    assert condition.message == (
        "The gang has 2 of 3 nodes. A new gang asks for all of them from 04:04:35 UTC on. To ask"
        " earlier, suspend and resume the job."
    )
    assert (world.job.status.reason, world.job.status.message) == ("Shrunk", condition.message)
    assert world.condition("Running").message.endswith("See the condition FullSize.")
    assert world.job.status.workers_status == "0/2 ready"


def fail(world: World) -> None:
    """A worker fails, and another gang is created."""
    world.pod(world.workers()[0].metadata.name, phase="Failed")
    world.settle()
    world.containers_stop()
    world.settle()


def test_a_shrunk_gang_runs_on_for_any_time():
    world = shrunk()
    world.pass_time(hours=9)
    assert world.settle().requeue_after is None
    assert (world.phase, world.job.status.attempt) == ("Running", 1)


@pytest.mark.parametrize(("minutes", "nodes"), [(59, 2), (60, 3)])
def test_an_hour_after_the_job_shrank_a_new_gang_asks_for_all_nodes(minutes, nodes):
    world = shrunk()
    (shrink_end,) = world.job.status.attempts
    world.now = shrink_end.end_time + timedelta(minutes=minutes)
    fail(world)
    assert (world.job.status.attempt, world.job.status.num_nodes) == (2, nodes)


def test_a_gang_that_does_not_find_them_shrinks_for_another_hour():
    world = shrunk()
    world.pass_time(hours=1)
    fail(world)
    shrink(world)
    world.pass_time(minutes=59)
    fail(world)
    assert (world.job.status.attempt, world.job.status.num_nodes) == (4, 2)


def test_a_new_gang_asks_for_all_nodes_if_the_time_of_the_shrink_is_unknown():
    world = shrunk()
    world.job = replace(world.job, status=replace(world.job.status, attempts=()))
    world.settle()
    assert world.condition("FullSize").message.endswith("The next gang asks for all of them.")
    fail(world)
    assert world.job.status.num_nodes == 3


def test_a_shrunk_gang_can_shrink_again():
    world = shrunk()
    world.pass_time(seconds=60)
    fail(world)
    assert (world.job.status.num_nodes, world.job.status.restarts) == (2, 1), "it keeps its size"
    place(world, 1)
    world.pass_time(seconds=30)
    world.settle()
    assert world.job.status.num_nodes == 1


def test_a_new_gang_does_not_shrink():
    world = World(make_job(numNodes=3, elastic={"minNodes": 2, "maxNodes": 3}), make_queue())
    world.step()
    assert world.job.status.message == "0 of 3 pods are running."
    assert world.step().status is None
    assert all(c.type != "FullSize" for c in world.job.status.conditions)


def test_below_min_nodes_the_gang_waits():
    world = elastic(fewest=2)
    place(world, 1)
    size = "The gang needs at least 2 nodes (elastic.minNodes)."
    assert world.job.status.message.endswith(size)
    assert world.condition("FullSize").message == size
    assert size not in world.condition("Scheduled").message
    assert world.condition("Running").message.endswith("See the condition Scheduled.")
    world.pass_time(hours=9)
    assert world.plan().applies == ()


def test_a_gang_waits_for_nodes_of_the_old_gang():
    world = elastic()
    place(world, 3)
    world.all_workers("Running")
    world.settle()
    world.pod("train-1-abcde", phase="Failed")
    world.settle()
    place(world, 1)
    assert world.condition("FullSize").status == "Unknown"
    world.pass_time(seconds=600)
    world.settle()
    assert world.job.status.attempt == 1, "the nodes are not free yet"
    world.containers_stop()
    left = world.settle_twice().requeue_after
    assert left == SHRINK_AFTER.total_seconds() - REPEAT_SECONDS, "counted from when they are free"
    world.pass_time(seconds=left)
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (2, 1)


def test_a_gang_held_by_another_controller_does_not_shrink():
    world = elastic()
    suspend_for_an_hour(world)
    assert world.job.status.attempt == 0
    assert all(c.type != "FullSize" for c in world.job.status.conditions)


def test_delays_count_from_the_creation_of_the_gang():
    world = elastic()
    assert world.observed().gang.child_jobs[-1].metadata.creation_timestamp == START
    assert timedelta(seconds=30) == SHRINK_AFTER
