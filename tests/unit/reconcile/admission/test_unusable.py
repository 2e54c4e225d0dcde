"""An admitted job that can have no gang with its queue and its spec: it returns its admission."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from admitting import running, submitted
from queue_lab import pods_of
from torchrun_controller.reconcile.admission.statuses import Stage
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.admission_status import charged
from unit.reconcile.admission.classifying import classify_world, deliver, status_update
from world import World, make_queue

LIMITED = {"quota": {"nodes": 8}, "limits": {"maxPriority": 1}}


def delete_queue(world: World) -> None:
    world.queue = None


def terminate_queue(world: World) -> None:
    assert world.queue is not None
    meta = replace(world.queue.metadata, deletion_timestamp=world.now)
    world.queue = replace(world.queue, metadata=meta)


def lower_limit(world: World) -> None:
    world.queue = make_queue(**LIMITED)


def invalidate_job(world: World) -> None:
    world.job = replace(world.job, invalid="spec.x: what is that?")


def admitted_job() -> World:
    world = submitted(priority=5)
    world.admit(2)
    return world


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (delete_queue, "QueueNotFound"),
        (terminate_queue, "QueueTerminating"),
        (lower_limit, "InvalidSpec"),
        (invalidate_job, "InvalidSpec"),
    ],
)
def test_a_job_that_can_have_no_gang_returns_its_admission(
    change: Callable[[World], None], reason: str
):
    world = admitted_job()
    change(world)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", reason)
    assert deliver(world) is Stage.REPORT
    assert world.condition("Admitted").reason == admission_status.OUTDATED
    assert charged(world.job) == 2, "a gang may be in creation"
    assert not classify_world(world).requeued
    world.settle()
    assert deliver(world) is Stage.RELEASE
    assert charged(world.job) == 0
    world.settle()
    assert [c.type for c in world.job.status.conditions].count("AdmissionRequested") == 0
    assert status_update(world) is None or deliver(world) is Stage.REPORT
    assert (world.gangs, world.job.status.reason) == ([], reason)


def test_the_job_waits_again_once_it_can_have_a_gang():
    world = admitted_job()
    delete_queue(world)
    world.settle()
    deliver(world)
    world.queue = make_queue(quota={"nodes": 8})
    world.settle()
    assert world.gangs == []
    assert deliver(world) is Stage.RELEASE
    world.settle()
    workload = classify_world(world).workload
    assert (workload.admitted, workload.nodes) == (0, 2)


def test_a_job_that_has_a_queue_again_keeps_its_admission():
    world = admitted_job()
    delete_queue(world)
    world.settle()
    world.queue = make_queue(quota={"nodes": 8})
    world.settle()
    assert (len(world.gangs), charged(world.job)) == (1, 2)
    assert classify_world(world).outdated == ""


def test_a_gang_that_exists_keeps_its_admission():
    world = running(priority=5)
    lower_limit(world)
    world.settle()
    assert (world.phase, charged(world.job)) == ("Running", 2)
    assert classify_world(world).outdated == ""


def test_pods_of_the_last_gang_keep_the_admission():
    world = running(priority=5)
    delete_queue(world)
    (child,) = world.gangs
    del world.objects["jobs", child.metadata.name]
    world.settle()
    assert classify_world(world).outdated == ""
    world.vanish(*(pod.metadata.name for pod in pods_of(world)))
    world.settle()
    assert world.job.status.reason == "QueueNotFound"
    assert classify_world(world).outdated != ""


def test_a_job_that_has_run_is_not_advised_to_choose_another_queue():
    world = running()
    delete_queue(world)
    world.delete_child_job()
    world.pass_time(seconds=3600)
    world.settle()
    assert world.job.status.message == (
        "TorchrunQueue gpu does not exist in namespace ml. Create it."
    )
