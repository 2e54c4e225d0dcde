"""A job keeps the reliability settings of its start after its queue is edited or deleted."""

import pytest
from msgspec.structs import replace

from torchrun_controller.reconcile.spec.reliability import resolve_reliability
from world import World, make_job, make_queue


def running(queue: object = None, **spec: object) -> World:
    world = World(make_job(numNodes=1, **spec), queue or make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def finished(queue: object = None) -> World:
    world = running(queue)
    world.job_condition("Complete")
    world.settle()
    assert world.phase == "Succeeded"
    return world


def test_a_shorter_deadline_ends_no_running_job():
    world = running()
    world.pass_time(hours=10)
    world.queue = make_queue(limits={"maxRunSeconds": 3600, "maxNodesPerJob": 1})
    world.settle()
    assert world.phase == "Running"
    # Nor does it end the next gang of a job that has run longer than the new limit.
    world.all_workers("Failed")
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.pass_time(hours=1)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Running", 1)


def test_a_longer_deadline_does_not_extend_running_jobs():
    world = running(make_queue(limits={"maxRunSeconds": 3600}))
    world.queue = make_queue()
    world.pass_time(hours=1)
    world.settle()
    assert world.phase == "TimedOut"
    assert "limits.maxRunSeconds of the queue" in world.job.status.message


def test_a_smaller_size_limit_does_not_refuse_the_next_gang():
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.queue = make_queue(limits={"maxNodesPerJob": 1})
    world.all_workers("Failed")
    world.settle()
    assert (world.job.status.attempt, len(world.gangs)) == (1, 2)
    later = World(make_job(numNodes=2), world.queue)
    later.settle()
    assert later.job.status.reason == "InvalidSpec"


def test_a_new_ttl_deletes_no_finished_job():
    world = finished()
    world.pass_time(days=30)
    world.queue = make_queue(reliability={"ttlSecondsAfterFinished": 60})
    assert world.settle().requeue_after is None
    assert not world.gone


def test_jobs_of_a_deleted_queue_keep_their_ttl():
    world = finished(make_queue(reliability={"ttlSecondsAfterFinished": 60}))
    world.queue = None
    assert world.settle().requeue_after == 60
    world.pass_time(seconds=60)
    world.step()
    assert world.gone


def test_a_job_that_ended_without_a_gang_keeps_its_last_settings():
    world = World(
        make_job(
            numNodes=1,
            volumes={"workspace": {"enabled": True, "source": "zip"}},
            reliability={"syncTimeoutSeconds": 60},
        ),
        make_queue(reliability={"ttlSecondsAfterFinished": 5}),
    )
    world.settle()
    assert world.job.status.queue_policy is None
    world.pass_time(seconds=60)
    world.settle()
    assert world.phase == "Failed"
    world.queue = make_queue()
    assert world.settle().requeue_after == 5


@pytest.mark.parametrize("setter", ["queue", "job"])
def test_restarts_follow_the_settings_at_the_start(setter):
    limits = {"reliability": {"maxRestarts": 1}}
    queue, job = (limits, {}) if setter == "queue" else ({}, limits)
    world = running(make_queue(**queue), **job)
    world.queue = make_queue(reliability={"restartPolicy": "Never"})
    world.all_workers("Failed")
    world.settle()
    assert (world.phase, len(world.gangs)) == ("Queued", 2)


def test_a_job_that_may_never_restart_cannot_permit_restarts_later():
    world = running(make_queue(reliability={"restartPolicy": "Never"}))
    world.queue = make_queue()
    world.suspend()
    world.spec(reliability=replace(world.job.spec.reliability, max_restarts=1))
    world.resume()
    assert world.job.status.reason == "InvalidSpec"
    assert "conflicts with reliability.restartPolicy Never" in world.job.status.message


@pytest.mark.parametrize("recorded", [True, False])
def test_an_edit_of_the_job_applies_at_once(recorded):
    world = running(make_queue(reliability={"ttlSecondsAfterFinished": 60}))
    if not recorded:  # a job of an earlier release
        world.job = replace(world.job, status=replace(world.job.status, queue_policy=None))
    mine = replace(world.job.spec.reliability, active_deadline_seconds=10)
    world.spec(reliability=mine)
    world.pass_time(seconds=10)
    world.settle()
    assert world.phase == "TimedOut"
    assert world.job.status.queue_policy.ttl_seconds_after_finished == 60


def test_before_its_first_gang_a_job_follows_its_queue():
    job = make_job(numNodes=1)
    queue = make_queue(reliability={"maxRestarts": 7})
    assert resolve_reliability(job, queue).max_restarts == 7
    assert resolve_reliability(job, None).max_restarts == 3
