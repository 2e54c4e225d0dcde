"""Each annotation is written twice, because the kubelet may miss one patch."""

import pytest
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.resources import PODS
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from world import World, make_job, make_queue


def starting_again() -> World:
    """A second gang whose start annotation has just been written."""
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.pod("train-0-abcde", phase="Failed")
    world.settle()
    world.containers_stop()
    world.settle()
    return world


def test_the_start_annotation_is_written_twice():
    world = starting_again()
    assert world.plan().applies == ()
    assert world.plan().requeue_after == REPEAT_SECONDS
    world.pass_time(seconds=REPEAT_SECONDS - 1)
    assert (world.plan().applies, world.plan().requeue_after) == ((), 1)
    world.pass_time(seconds=1)
    applies = world.step().applies
    assert [a.body["metadata"]["annotations"] for a in applies] == [{names.START: "1"}]
    world.pass_time(hours=1)
    assert world.plan().applies == (), "no third write"


@pytest.mark.parametrize("hours", [-1, 1])
def test_clock_skew_delays_no_repetition(hours):
    world = starting_again()
    world.pass_time(hours=hours)
    assert len(world.step().applies) == 1
    assert {pod.metadata.annotations.notification_time for pod in world.workers()} == {""}


def test_an_invalid_time_is_removed():
    world = starting_again()
    key = (PODS.plural, "train-r1-0-abcde")
    meta = world.objects[key].metadata
    annotations = replace(meta.annotations, notification_time="soon")
    world.objects[key] = replace(
        world.objects[key], metadata=replace(meta, annotations=annotations)
    )
    assert [a.name for a in world.plan().applies] == ["train-r1-0-abcde"]


def test_a_first_gang_needs_no_further_write():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.pass_time(hours=1)
    assert world.plan().applies == ()
