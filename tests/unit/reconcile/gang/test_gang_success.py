"""A gang that succeeds during its deletion is a success and is not repeated."""

import pytest

from torchrun_api.kinds.resources import JOBS
from torchrun_api.kinds.status import Attempt
from torchrun_controller.reconcile import Plan
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.model.plan import StatusWrite
from world import World, make_job, make_queue


def running(nodes: int = 1, **spec: object) -> World:
    world = World(make_job(numNodes=nodes, **spec), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def carry_out_late(world: World, plan: Plan) -> None:
    """The gang succeeds between the reconcile and its writes."""
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    for write in plan.writes:
        if not isinstance(write, StatusWrite):
            world.write(write)
        elif write.before_deletes:
            world.write_status(write.status)


def test_a_child_job_is_deleted_with_a_precondition():
    world = running()
    world.spec(suspend=True)
    deletes = {delete.kind: delete for delete in world.plan().deletes}
    assert (
        deletes[JOBS].resource_version
        == world.objects[JOBS.plural, "train"].metadata.resource_version
    )


@pytest.mark.parametrize("by", ["suspension", "preemption"])
def test_a_success_wins_over_suspension_and_preemption(by):
    world = running()
    if by == "suspension":
        world.spec(suspend=True)
    else:
        world.admit(1)
        world.preempt()
    carry_out_late(world, world.plan())
    world.settle()
    assert world.phase == "Succeeded"
    assert world.job.status.attempts == (), "the suspension did not end it"
    world.resume()
    assert len(world.gangs) == 1


def test_a_success_wins_over_a_resize_with_an_existing_gang():
    world = running(2, elastic={"minNodes": 1, "maxNodes": 4})
    world.spec(num_nodes=3)
    carry_out_late(world, world.plan())
    assert (JOBS.plural, "train-r1") in world.objects
    world.settle()
    status = world.job.status
    assert (status.phase, status.message) == ("Succeeded", "2 of 2 pods succeeded.")
    assert (status.workers.succeeded, status.attempts) == (2, ())
    world.settle()
    world.containers_stop()
    left = [pod for pod in world.workers() if pod.status.phase != "Succeeded"]
    assert left == [], "the next gang is deleted"


@pytest.mark.parametrize("end", ["drained", "failed"])
def test_a_recorded_end_of_a_successful_gang_does_not_count(end):
    """A drained pod may succeed in its grace period, while the next gang waits for admission."""
    world = running(reliability={"maxRestarts": 5})
    world.delete_child_job()
    world.settle()  # attempt 1; the second failure is followed by a back-off
    name = world.workers()[0].metadata.name
    world.all_workers("Running")
    if end == "drained":
        world.drain(name)
    else:
        world.end_container(name, "trainer", exit_code=1, finished_at=world.now)
    world.step()
    before = world.job.status
    assert (before.reason, before.restarts + before.disruptions) == ("BackingOff", 2)
    world.all_workers("Succeeded")
    world.job_condition("Complete")
    world.settle()
    after = world.job.status
    assert (after.phase, after.restarts, after.disruptions) == ("Succeeded", 0, 1)
    assert [attempt.number for attempt in after.attempts] == [0]


def test_edited_counts_do_not_become_negative():
    end = Attempt(number=3, reason="Exited", counted=True)
    assert Counts(0, 4).without([end]) == Counts(0, 4)
