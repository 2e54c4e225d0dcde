"""Resizes whose next gang has to wait, or is not possible."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_controller.reconcile.model.plan import StatusWrite
from torchrun_controller.reconcile.pods.nodes import NODES_RETRY
from unit.reconcile.gang.test_elastic import QUEUE, elastic, place
from world import ZIP, World, make_job, make_queue

UPLOADED = {"torchrun.ai/workspace-sha256": "ab" * 32}


def with_setup() -> World:
    """A running gang of 3 nodes with an uploaded workspace and a setup."""
    job = make_job(
        numNodes=3,
        elastic={"minNodes": 1, "maxNodes": 4},
        volumes=ZIP,
        annotations_=UPLOADED,
        setupCommand="make",
    )
    world = World(job, make_queue())
    world.settle()
    world.sync_done()
    world.settle()
    world.setup_done()
    world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def test_a_gang_ends_before_the_setup_of_the_next_one():
    world = with_setup()
    world.spec(setup_command="make all", num_nodes=2)
    plan = world.plan()
    *_, status, _ = plan.writes
    assert isinstance(status, StatusWrite), "else the end of the gang would be a failure"
    assert [(d.kind, d.name, d.grace_seconds) for d in plan.deletes] == [(JOBS, "train", None)]
    world.settle()
    assert world.phase == "Syncing"
    world.containers_stop()
    world.setup_done()
    world.settle()
    status = world.job.status
    assert (status.num_nodes, status.attempt, status.restarts, status.disruptions) == (2, 1, 0, 0)
    assert [(a.number, a.counted, a.reason) for a in status.attempts] == [(0, False, "Resizing")]


@pytest.mark.parametrize("scales_back", [False, True])
def test_a_recorded_resize_is_carried_out(scales_back):
    """The controller died between the status and the deletion of the gang."""
    world = with_setup()
    world.spec(setup_command="make all", num_nodes=2)
    plan = world.plan()
    assert plan.status is not None
    world.write_status(plan.status)
    if scales_back:
        world.spec(num_nodes=3)
    world.settle()
    assert (JOBS.plural, "train") not in world.objects
    world.containers_stop()
    world.setup_done()
    world.settle()
    status = world.job.status
    assert (status.num_nodes, status.restarts) == (3 if scales_back else 2, 0)
    assert [(a.number, a.reason) for a in status.attempts] == [(0, "Resizing")]


def test_the_end_of_the_pods_of_a_resized_gang_is_no_failure():
    """The watch of Jobs is late: the Job is deleted, and so are its pods."""
    world = with_setup()
    world.spec(setup_command="make all", num_nodes=2)
    child = world.objects[JOBS.plural, "train"]
    world.step()
    world.objects[JOBS.plural, "train"] = child
    world.settle()
    world.pod("train-1-abcde", phase="Failed")
    world.settle()
    assert world.phase == "Syncing"
    assert world.job.status.last_failure is None
    assert [(a.number, a.reason) for a in world.job.status.attempts] == [(0, "Resizing")]


def test_a_gang_that_shrinks_before_a_setup_leaves_no_pods():
    world = with_setup()
    world.pod("train-1-abcde", phase="Failed")
    world.settle()
    world.containers_stop()
    place(world, 2)
    world.spec(setup_command="make all")
    world.pass_time(seconds=30)
    world.settle()
    world.containers_stop()
    world.setup_done()
    world.settle()
    assert [a.reason for a in world.job.status.attempts][-1] == "Shrinking"
    assert all(kind != PODS.plural or "train-r1-" not in name for kind, name in world.objects)


@pytest.mark.parametrize("queue", [None, {"nodeResources": {"memory": "12Gigs"}}])
def test_a_gang_goes_on_if_none_of_the_new_size_is_possible(queue):
    world = elastic()
    world.all_workers("Running")
    world.settle()
    world.queue = None if queue is None else make_queue(**queue)
    world.spec(num_nodes=2)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 0)
    condition = world.condition("FullSize")
    if queue is None:
        assert condition.reason == "QueueNotFound"
        assert condition.message == ("The gang has 3 of 2 nodes. TorchrunQueue gpu does not exist.")
    else:
        assert condition.reason == "InvalidSpec"
        assert "12Gigs" in condition.message
    world.queue = make_queue(**QUEUE)
    world.settle()
    assert world.job.status.num_nodes == 2


def test_a_gang_goes_on_while_its_queue_is_invalid():
    world = elastic()
    world.all_workers("Running")
    world.settle()
    world.queue = replace(make_queue(), invalid="spec.image is missing")
    world.spec(num_nodes=2)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 0)
    assert "spec.image is missing" in world.condition("FullSize").message


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_gang_is_not_resized_before_the_nodes_are_read(shrinks):
    world = elastic()
    if shrinks:
        place(world, 2)
        world.pass_time(seconds=30)
    else:
        world.all_workers("Running")
        world.settle()
        world.spec(num_nodes=2)
    world.nodes_awaited = True
    assert world.settle().requeue_after == NODES_RETRY
    assert (world.job.status.attempt, world.condition("FullSize").reason) == (0, "NodesNotRead")
    world.nodes_awaited = False
    world.settle()
    assert (world.job.status.attempt, world.job.status.num_nodes) == (1, 2)
