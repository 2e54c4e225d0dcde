"""A user deletes the child Job: the end is counted and recorded like any other."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.kinds.status import Attempt
from torchrun_controller.reconcile.gang import restarts
from world import START, World, make_job, make_queue


def running(nodes: int = 1, **reliability: object) -> World:
    world = World(make_job(numNodes=nodes, reliability=reliability), make_queue())
    world.settle()
    run(world)
    return world


def run(world: World) -> None:
    world.containers_stop()
    world.all_workers("Running")
    world.settle()


def delete_in_foreground(world: World) -> None:
    """The Job stays until its pods are gone."""
    child = world.observed().gang.child_jobs[-1]
    meta = replace(child.metadata, deletion_timestamp=world.now)
    world.objects[JOBS.plural, child.metadata.name] = replace(child, metadata=meta)


@pytest.mark.parametrize("how", ["background", "foreground"])
def test_restart_policy_never_creates_no_other_gang(how):
    world = running(restartPolicy="Never")
    if how == "background":
        world.delete_child_job()
    else:
        delete_in_foreground(world)
    world.settle()
    assert (world.phase, world.job.status.reason, len(world.gangs)) == ("Failed", "JobDeleted", 1)
    assert "restartPolicy is Never" in world.job.status.message
    assert world.job.status.last_failure.reason == "JobDeleted"


def test_restart_policy_never_and_a_suspension():
    """A pause by the user is not a failure. A deleted Job is one, paused or not."""
    world = running(restartPolicy="Never")
    world.suspend()
    world.resume()
    assert len(world.gangs) == 2
    run(world)
    world.delete_child_job()
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Failed", "JobDeleted")


def test_every_deletion_is_recorded_and_backs_off():
    world = running(maxRestarts=0)
    waits = []
    for _ in range(4):
        world.delete_child_job()
        left = world.rest().requeue_after or 0
        waits.append(left if world.job.status.reason == "BackingOff" else 0)
        world.pass_time(seconds=waits[-1])
        world.settle()
        run(world)
    status = world.job.status
    assert waits == [0, 10, 20, 40]
    assert (status.restarts, status.disruptions, status.attempt) == (0, 4, 4)
    assert [a.reason for a in status.attempts] == ["JobDeleted"] * 4


def test_a_crash_after_the_new_gang_is_created_records_it_once():
    world = running()
    world.delete_child_job()
    world.step(writes=99)
    world.settle()
    status = world.job.status
    assert (status.attempt, status.disruptions) == (1, 1)
    assert [(a.number, a.reason) for a in status.attempts] == [(0, "JobDeleted")]


@pytest.mark.parametrize("then", ["suspend", "delete", "preempt"])
def test_a_counted_failure_stays_after_its_job_is_deleted(then):
    """The Job of the failed gang is deleted during the back-off. Its count stays."""
    world = running(maxRestarts=3)
    failures = 0
    while world.phase != "Failed":
        failures += 1
        assert failures < 9
        world.all_workers("Failed")
        world.settle()
        if world.job.status.reason == "BackingOff":
            before = world.job.status.restarts
            if then == "suspend":
                world.spec(suspend=True)
                world.settle()
                world.spec(suspend=False)
            elif then == "preempt":
                world.admit(1)
                world.preempt()
                world.settle()
                world.admit(1)
            else:
                world.delete_child_job()
            world.settle()
            assert world.job.status.restarts == before
            assert world.job.status.reason == "BackingOff", "the back-off continues"
            world.pass_time(minutes=5)
            world.settle()
        run(world)
    status = world.job.status
    assert (failures, status.restarts) == (4, 3)
    assert [a.counted for a in status.attempts] == [True] * 3
    assert [a.reason for a in status.attempts] == ["ExitCode"] * 3


def test_a_failure_is_in_the_status_at_once():
    world = running(maxRestarts=3)
    world.all_workers("Failed")
    world.settle()
    run(world)
    world.all_workers("Failed")
    world.step()
    assert (world.job.status.reason, world.job.status.restarts) == ("BackingOff", 2)


def test_foreground_deletion_on_a_lost_node_is_not_waited_for():
    world = World(make_job(numNodes=2, reliability={"allowUnfencedRestart": True}), make_queue())
    world.node("node-1")
    world.node("node-2")
    world.settle()
    run(world)
    world.place("train-1-abcde", "node-2")
    world.settle()
    world.node("node-2", False)
    delete_in_foreground(world)
    world.pass_time(minutes=2)
    world.settle()
    assert (len(world.gangs), world.job.status.attempt) == (2, 1)
    assert world.job.status.disruptions == 1
    assert not [d for d in world.plan().deletes if d.kind is JOBS]


def test_a_suspension_does_not_wait_for_a_job_on_a_lost_node():
    world = World(make_job(numNodes=2), make_queue())
    world.node("node-1")
    world.node("node-2")
    world.settle()
    run(world)
    world.place("train-1-abcde", "node-2")
    world.settle()
    delete_in_foreground(world)
    world.spec(suspend=True)
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Running", "Suspending")
    world.node("node-2", False)
    world.vanish("train-0-abcde")
    world.pass_time(minutes=2)
    world.settle()
    assert world.phase == "Suspended"
    assert [w.node for w in world.job.status.unfenced] == ["node-2"]


def test_workers_of_a_deleted_job_are_deleted_or_orphaned():
    """The garbage collector ends the pods with their grace period, or the user orphans them."""
    world = running(nodes=2)
    delete_in_foreground(world)
    assert world.step().deletes == ()
    world.pass_backoff()
    assert world.step().deletes == ()
    assert len(world.gangs) == 2
    assert world.step().deletes == ()


def test_a_failure_before_the_deletion_is_the_cause():
    world = running(maxRestarts=1)
    name = world.workers()[0].metadata.name
    world.end_container(name, "trainer", exit_code=3, finished_at=world.now)
    world.pass_time(seconds=5)
    delete_in_foreground(world)
    world.settle()
    assert world.job.status.attempts[0].reason == "ExitCode"
    assert world.job.status.restarts == 1
    world = running(maxRestarts=1)
    delete_in_foreground(world)
    world.pass_time(seconds=5)
    name = world.workers()[0].metadata.name
    world.end_container(name, "trainer", exit_code=3, finished_at=world.now)
    world.settle()
    assert world.job.status.attempts[0].reason == "JobDeleted"


def test_pods_deleted_with_their_job_are_no_cause():
    """The deletion time of the pods may be a second before the deletion time of the Job."""
    world = running(nodes=2)
    world._ending((PODS.plural, "train-0-abcde"), 30)
    world.pass_time(seconds=1)
    delete_in_foreground(world)
    world.settle()
    assert world.job.status.attempts[0].reason == "JobDeleted"


def ended(minutes: float, ran: float, reason: str = "ExitCode") -> Attempt:
    return Attempt(
        start_time=START,
        end_time=START + timedelta(minutes=minutes),
        running_seconds=round(60 * ran),
        reason=reason,
    )


def test_only_time_with_all_workers_running_resets_the_back_off():
    """12 minutes in the scheduler's queue and an instant crash, repeatedly."""
    slow_start = ended(minutes=12, ran=0)
    assert restarts.restart_delay((slow_start,) * 3, slow_start) == timedelta(seconds=40)
    assert restarts.restart_delay((ended(12, 11),), slow_start) == timedelta()
    assert restarts.restart_delay((slow_start,) * 3, ended(12, 11)) == timedelta()
    assert restarts.restart_delay((slow_start,) * 3, ended(1, 0, "Suspended")) == timedelta()


def test_the_running_time_of_a_gang_is_recorded():
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    world.pass_time(minutes=12)
    run(world)
    world.pass_time(seconds=90)
    world.all_workers("Failed")
    world.settle()
    first = world.job.status.attempts[0]
    assert (first.running_seconds, first.start_time) == (90, START)
    world.containers_stop()
    world.all_workers("Failed")
    world.settle()
    assert world.job.status.attempts[1].running_seconds == 0


@pytest.mark.parametrize("head", [False, True])
def test_pods_of_an_older_gang_are_deleted_after_the_next_job_was_deleted(head):
    """The controller died before it ended the old gang, and a user deleted the next Job."""
    job = make_job(numNodes=2, reliability={"maxRestarts": 5}, **({"head": {}} if head else {}))
    world = World(job, make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.end_container(
        world.workers()[0].metadata.name, "trainer", exit_code=1, finished_at=world.now
    )
    plan = world.plan()
    for apply in plan.applies:
        world.write(apply)
    world.write_status(plan.status)  # and its deletes are lost
    world.delete_child_job()
    world.rest()
    assert world.job.status.reason == "BackingOff"
    snapshot = world.observed()
    pods = (*snapshot.gang.workers, *snapshot.gang.stale_pods)
    alive = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
    assert [pod.metadata.name for pod in alive if pod.status.phase == "Running"] == []
