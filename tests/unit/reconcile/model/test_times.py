"""Waits and timeouts keep their length in later attempts and with a clock that is set back."""

from datetime import timedelta

import pytest

from torchrun_api.kinds.resources import CLAIMS, PODS, TORCHRUN_JOBS
from torchrun_controller.reconcile.model.times import seconds_left
from world import START, ZIP, World, make_job, make_queue


def backing_off() -> World:
    world = World(make_job(numNodes=1, reliability={"maxRestarts": 9}), make_queue())
    world.settle()
    for _ in range(2):
        world.all_workers("Running")
        world.settle()
        world.all_workers("Failed")
        world.rest()
    assert (world.job.status.reason, world.plan().requeue_after) == ("BackingOff", 10)
    return world


def syncing_again() -> World:
    """A gang has failed, and the PVC with the workspace was deleted."""
    world = World(
        make_job(numNodes=1, volumes=ZIP, reliability={"syncTimeoutSeconds": 60}), make_queue()
    )
    world.settle()
    world.pass_time(seconds=50)
    world.claim_is("Bound")
    world.sync_done()
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.pass_time(hours=1)
    del world.objects[CLAIMS.plural, "train-workspace"]
    for key in [key for key in world.objects if "sync" in key[1]]:
        del world.objects[key]
    world.all_workers("Failed")
    world.settle()
    assert world.phase == "Syncing"
    return world


def test_the_sync_of_a_later_gang_has_the_same_timeout():
    world = syncing_again()
    assert world.job.status.sync_start_time == world.now
    world.pass_time(seconds=59)
    assert world.settle().requeue_after == 1
    assert world.phase == "Syncing"
    world.pass_time(seconds=1)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "SyncTimeout")
    assert "within 60 s" in world.job.status.message
    assert world.job.status.restarts == 1, "the previous failure counts"
    assert world.job.status.sync_start_time is None


@pytest.mark.parametrize("again", [True, False], ids=["later", "first"])
def test_a_suspension_restarts_the_sync_timeout(again):
    world = syncing_again()
    if not again:
        spec = {"volumes": ZIP, "reliability": {"syncTimeoutSeconds": 60}}
        world = World(make_job(numNodes=1, **spec), make_queue())
        world.settle()
    world.pass_time(seconds=50)
    world.suspend()
    assert world.phase == "Suspended"
    world.pass_time(hours=1)
    world.resume()
    assert world.phase == "Syncing"
    world.pass_time(seconds=59)
    world.settle()
    assert world.phase == "Syncing"
    world.pass_time(seconds=1)
    world.settle()
    assert world.phase == "Failed"


def test_a_back_off_takes_its_own_length_when_the_clock_is_set_back():
    world = backing_off()
    gangs = len(world.gangs)
    world.pass_time(hours=-1)
    assert world.rest().requeue_after == 10
    world.pass_time(seconds=9)
    assert world.rest().requeue_after == 1
    world.pass_time(seconds=1)
    world.settle()
    assert len(world.gangs) == gangs + 1


def test_a_sync_timeout_takes_its_own_length_when_the_clock_is_set_back():
    world = syncing_again()
    world.pass_time(minutes=-30)
    world.settle()
    world.pass_time(seconds=60)
    world.settle()
    assert world.phase == "Failed"


def test_running_time_continues_when_the_clock_is_set_back():
    world = World(make_job(numNodes=1, reliability={"activeDeadlineSeconds": 600}), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.pass_time(minutes=-30)
    world.settle()
    world.pass_time(minutes=10)
    world.settle()
    assert world.phase == "TimedOut"


def test_a_finished_job_keeps_its_times():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    world.job_condition("Complete")
    world.settle()
    status = world.job.status
    world.pass_time(hours=-1)
    world.settle()
    assert world.job.status == status


def finished_with_ttl(seconds: int) -> World:
    world = World(
        make_job(numNodes=1, reliability={"ttlSecondsAfterFinished": seconds}), make_queue()
    )
    world.settle()
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    return world


def test_a_ttl_takes_its_own_length_when_the_clock_is_set_back():
    world = finished_with_ttl(60)
    world.pass_time(hours=-1)
    assert world.rest().requeue_after == 60
    assert world.job.status.completion_time == world.now
    world.pass_time(seconds=59)
    assert world.rest().requeue_after == 1
    world.pass_time(seconds=1)
    (delete,) = world.plan().deletes
    assert (delete.kind, delete.name) == (TORCHRUN_JOBS, "train")


def test_a_ttl_of_zero_does_not_wait_for_a_clock_that_is_set_back():
    world = World(make_job(numNodes=1, reliability={"ttlSecondsAfterFinished": 0}), make_queue())
    world.settle()
    world.job_condition("Complete")
    world.step()
    world.pass_time(hours=-1)
    assert [delete.kind for delete in world.plan().deletes] == [TORCHRUN_JOBS]


def test_workers_of_a_head_have_their_own_grace_when_the_clock_is_set_back():
    world = World(make_job(numNodes=2, head={}), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.job_condition("Complete")
    world.settle()
    assert world.plan().requeue_after == 30
    world.pass_time(hours=-1)
    assert world.rest().requeue_after == 30
    world.pass_time(seconds=29)
    assert world.rest().requeue_after == 1
    world.pass_time(seconds=1)
    assert [delete.kind for delete in world.plan().deletes] == [PODS]


@pytest.mark.parametrize(
    ("since", "left"),
    [(None, 10), (0, 10), (-4, 6), (-10, 0), (-11, -1), (3, 10), (10, 10), (11, 0), (3600, 0)],
)
def test_the_remaining_time_is_never_longer_than_the_wait(since, left):
    began = None if since is None else START + timedelta(seconds=since)
    assert seconds_left(timedelta(seconds=10), began, START) == left
