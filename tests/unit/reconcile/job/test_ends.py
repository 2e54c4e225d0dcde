"""Suspension, resize, deadlines, and the time after the end of a job."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS, SERVICES
from torchrun_api.kinds.status import WorkersStatus
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from world import ZIP, World, make_job, make_queue


def running(**spec: object) -> World:
    world = World(make_job(**{"numNodes": 2, **spec}), make_queue())
    world.settle()
    if world.phase == "Syncing":
        world.sync_done()
        world.settle()
    world.all_workers("Running")
    world.settle()
    assert world.phase == "Running"
    return world


def test_a_job_that_is_created_suspended_creates_nothing():
    world = World(make_job(numNodes=2, volumes=ZIP, suspend=True), make_queue())
    world.settle()
    assert (world.phase, world.created) == ("Suspended", [])
    assert world.condition("Suspended").status == "True"
    world.resume()
    assert world.phase == "Syncing"
    world.sync_done()
    world.settle()
    assert world.created[-2:] == [(JOBS.plural, "train"), (SERVICES.plural, "train")]
    assert world.condition("Suspended").status == "False"


def test_a_suspension_keeps_only_claims_and_a_resume_is_no_restart():
    world = running(volumes=ZIP)
    world.pass_time(seconds=40)
    world.spec(suspend=True)
    plan = world.step()
    assert [d.kind for d in plan.deletes] == [JOBS]
    assert (world.phase, world.job.status.reason) == ("Running", "Suspending")
    assert world.settle().events == (), "its reason was told"
    assert "Waiting for 2 pods to terminate" in world.job.status.message
    world.pass_time(seconds=5)
    world.containers_stop()
    world.settle()
    assert world.phase == "Suspended"
    assert world.job.status.running_seconds == 40, "as of its gang, without the grace period"
    assert [o.metadata.name for o in world.observed().workspace.sync_pods] == ["train-sync-0"]
    assert {plural for plural, _ in world.objects} == {CLAIMS.plural, SERVICES.plural, PODS.plural}
    world.resume()
    status = world.job.status
    assert (world.phase, status.attempt, status.restarts, status.disruptions) == ("Queued", 1, 0, 0)
    assert [a.reason for a in status.attempts] == ["Suspended"]


def test_a_suspension_deletes_the_sync_pod():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    world.pod("train-sync-0", phase="Running")
    world.spec(suspend=True)
    world.settle()
    assert world.phase == "Suspended"
    assert [key for key in world.objects if key[0] == PODS.plural] == []


def test_a_suspension_waits_for_a_terminating_sync_pod():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.settle()
    key = (PODS.plural, "train-sync-0")
    world.pod("train-sync-0", phase="Running")
    meta = replace(world.objects[key].metadata, deletion_timestamp=world.now)
    world.objects[key] = replace(world.objects[key], metadata=meta)
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Syncing", "Suspending")


def test_toggling_suspend_quickly_creates_one_new_gang():
    world = running()
    for suspend in (True, False, True, False):
        world.spec(suspend=suspend)
        world.step()
    world.settle()
    world.containers_stop()
    world.settle()
    live = [name for plural, name in world.objects if plural == JOBS.plural]
    assert len(live) == 1
    assert world.job.status.restarts == 0


def test_a_suspension_keeps_count_and_number_of_an_unrecorded_gang():
    world = running(reliability={"maxRestarts": 1})
    world.pod("train-0-abcde", phase="Failed")
    world.pass_backoff()
    world.step(writes=2)
    assert (world.created[-1], world.job.status.restarts) == ((JOBS.plural, "train-r1"), 0)
    world.spec(suspend=True)
    world.step(writes=99)
    world.resume()
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 1)
    world.spec(suspend=True)
    world.settle()
    world.containers_stop()
    world.resume()
    assert [child.metadata.name for child in world.gangs] == ["train", "train-r1", "train-r2"]
    assert world.job.status.restarts == 1


def test_a_suspension_keeps_an_unrecorded_first_gang():
    world = World(make_job(numNodes=1), make_queue())
    world.step(writes=1)
    world.spec(suspend=True)
    world.step(writes=99)
    world.containers_stop()
    world.resume()
    assert [child.metadata.name for child in world.gangs] == ["train"]


def test_suspension_wins_over_restart_and_success_over_suspension():
    world = running()
    world.pod("train-0-abcde", phase="Failed")
    world.spec(suspend=True)
    world.settle()
    assert (JOBS.plural, "train-r1") not in world.created
    done = running()
    done.job_condition("Complete")
    done.spec(suspend=True)
    done.settle()
    assert done.phase == "Succeeded"


def test_a_suspension_of_a_finished_job_is_reported_only():
    world = running()
    world.job_condition("Complete")
    world.settle()
    world.spec(suspend=True)
    world.settle()
    assert world.phase == "Succeeded"
    assert world.condition("Suspended").reason == "AlreadyFinished"
    world.resume()
    assert all(c.reason != "AlreadyFinished" for c in world.job.status.conditions)


def test_a_resize_is_a_new_gang_and_no_restart():
    world = running(elastic={"minNodes": 1, "maxNodes": 4})
    world.spec(num_nodes=3)
    world.step()
    assert world.job.status.reason == "Resizing"
    world.settle()
    assert world.job.status.reason == "WaitingForOldGang"
    world.containers_stop()
    world.all_workers("Running")
    world.settle()
    status = world.job.status
    assert (world.phase, status.num_nodes, status.attempt, status.restarts) == ("Running", 3, 1, 0)
    assert status.selector == "torchrun-job-name=train,app.kubernetes.io/component=worker"


def test_the_deadline_counts_running_time_only():
    world = running(reliability={"activeDeadlineSeconds": 100})
    world.pass_time(seconds=60)
    world.suspend()
    world.pass_time(hours=5)
    world.resume()
    world.all_workers("Running")
    plan = world.settle_twice()
    assert plan.requeue_after == 40 - REPEAT_SECONDS
    world.pass_time(seconds=plan.requeue_after)
    plan = world.step()
    assert world.phase == "TimedOut"
    assert [d.grace_seconds for d in plan.deletes] == [30], "time for a last checkpoint"
    assert "100 s" in world.job.status.message
    assert world.job.status.workers == WorkersStatus(running=2)
    world.containers_stop()
    assert world.plan().deletes == ()
    world.settle()
    assert world.job.status.workers == WorkersStatus()


@pytest.mark.parametrize(
    ("asked", "most", "seconds", "whose"),
    [
        (None, 100, 100, "limits.maxRunSeconds"),
        (300, 100, 100, "limits.maxRunSeconds"),
        (60, 100, 60, "activeDeadlineSeconds"),
        (60, None, 60, "activeDeadlineSeconds"),
    ],
)
def test_max_run_seconds_of_the_queue_is_an_upper_bound(asked, most, seconds, whose):
    reliability = {"activeDeadlineSeconds": asked} if asked else {}
    queue = make_queue(limits={"maxRunSeconds": most} if most else {})
    world = World(make_job(numNodes=1, reliability=reliability), queue)
    world.settle()
    world.all_workers("Running")
    assert world.settle().requeue_after == seconds
    world.pass_time(seconds=seconds)
    world.step()
    assert world.phase == "TimedOut"
    assert f"{seconds} s ({whose}" in world.job.status.message


def test_a_clock_that_is_set_back_keeps_the_running_time():
    world = running()
    world.pass_time(hours=-1)
    world.spec(suspend=True)
    world.settle()
    assert world.job.status.running_seconds == 0


def test_a_queued_gang_has_no_deadline():
    world = World(make_job(numNodes=1, reliability={"activeDeadlineSeconds": 5}), make_queue())
    assert world.settle().requeue_after is None
    world.pass_time(hours=1)
    world.settle()
    assert world.phase == "Queued"


def test_a_workspace_that_is_not_ready_in_time_fails_the_job():
    world = World(
        make_job(numNodes=1, volumes=ZIP, reliability={"syncTimeoutSeconds": 60}), make_queue()
    )
    plan = world.settle()
    assert plan.requeue_after == 60
    world.pass_time(seconds=61)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "SyncTimeout")
    assert "syncTimeoutSeconds" in world.job.status.message
    assert world.observed().workspace.sync_pods == (), "no pod waits for a finished job"


def test_without_a_ttl_nothing_is_deleted():
    world = running()
    world.job_condition("Complete")
    world.settle()
    world.pass_time(hours=1000)
    assert (world.plan().deletes, world.plan().requeue_after) == ((), None)


def test_an_unrecorded_gang_is_recognised_by_its_pods():
    """Its Job was deleted, and its pod still terminates. The next gang has another name."""
    world = World(make_job(numNodes=1), make_queue())
    world.step(writes=1)
    del world.objects[JOBS.plural, "train"]
    world.settle()
    assert [child.metadata.name for child in world.gangs] == ["train", "train-r1"]
    assert world.job.status.reason == "WaitingForOldGang"


def test_a_failure_after_a_suspension_that_was_not_carried_out_is_the_root_cause():
    """The controller died after the status, and the user resumed the job."""
    world = running()
    world.spec(suspend=True)
    status = world.plan().status
    assert status is not None
    world.write_status(status)
    world.spec(suspend=False)
    world.pod("train-1-abcde", phase="Failed")
    world.settle()
    assert world.job.status.last_failure.message == "Pod train-1-abcde failed"
    assert [(end.number, end.reason) for end in world.job.status.attempts] == [(0, "Suspended")]
    assert len(world.gangs) == 2
