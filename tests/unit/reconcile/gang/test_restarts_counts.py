"""Failures count once, even if a status was lost."""

from msgspec.structs import replace

from torchrun_api.kinds.resources import JOBS
from torchrun_controller.reconcile.gang.gang import unrecorded_ends
from unit.reconcile.failing import fail, running
from world import make_queue


def test_a_crash_before_the_status_counts_nothing_twice_and_loses_nothing():
    world = running()
    fail(world, message='{"rank": 0, "message": "ValueError: bad", "exitCode": 1}')
    before = world.job.status
    world.step()
    world.job = replace(world.job, status=before)
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.disruptions) == (1, 1, 0)
    assert [a.number for a in status.attempts] == [0]
    assert "ValueError: bad" in status.attempts[0].message
    assert world.created.count((JOBS.plural, "train-r1")) == 1


def test_two_crashes_before_the_status_lose_nothing():
    world = running()
    before = world.job.status
    for attempt in ("first", "second"):
        fail(world, message=f'{{"rank": 0, "message": "ValueError: {attempt}", "exitCode": 1}}')
        world.pass_backoff()
        world.step()
        world.job = replace(world.job, status=before)
        world.containers_stop()
        world.all_workers("Running")
    world.settle()
    status = world.job.status
    assert (status.attempt, status.restarts) == (2, 2)
    assert [(a.number, a.counted) for a in status.attempts] == [(0, True), (1, True)]
    assert ["ValueError: first" in a.message for a in status.attempts] == [True, False]


def test_a_recorded_gang_has_no_unrecorded_end():
    world = running()
    fail(world)
    before = world.job.status
    world.pass_backoff()
    world.step()
    recorded, world.job = world.job, replace(world.job, status=before)
    observed = world.observed()
    assert [end.number for end in unrecorded_ends(observed.job, observed.gang)] == [0]
    world.job = recorded
    observed = world.observed()
    assert observed.gang.current_job.metadata.annotations.cause
    assert unrecorded_ends(observed.job, observed.gang) == ()


def test_invalid_annotations_are_ignored():
    world = running()
    fail(world)
    before = world.job.status
    world.pass_backoff()
    world.step()
    child = world.objects[JOBS.plural, "train-r1"]
    odd = replace(child.metadata.annotations, cause="{", restarts="x")
    world.objects[JOBS.plural, "train-r1"] = replace(
        child, metadata=replace(child.metadata, annotations=odd)
    )
    world.job = replace(world.job, status=before)
    world.settle()
    assert (world.job.status.attempt, world.job.status.attempts) == (1, ())


def test_a_deleted_job_leaves_the_failure_before_it_counted_once():
    world = running(maxRestarts=1)
    fail(world)
    world.settle()
    world.containers_stop()
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 1)
    world.delete_child_job()
    world.settle()
    world.pass_time(seconds=10)
    world.settle()
    assert (world.phase, world.job.status.attempt, world.job.status.restarts) == ("Queued", 2, 1)
    world.delete_child_job()
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.job.status.attempt) == ("Suspended", 2), "no number is used again"


def test_a_failure_whose_restart_waits_for_the_queue_is_counted_once():
    world = running()
    fail(world)
    world.queue = None
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "QueueNotFound")
    assert world.job.status.restarts == 1
    world.queue = make_queue()
    world.settle()
    assert (world.phase, world.job.status.restarts, world.job.status.attempt) == ("Queued", 1, 1)
