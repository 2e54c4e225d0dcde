"""A large gang ends by one request, and before the next gang is created."""

import pytest

from torchrun_api import names
from torchrun_api.kinds import JOBS, PODS
from torchrun_controller.reconcile.job.next_attempt import (
    LARGE_GANG_WAIT,
    LARGE_GANG_WAIT_PER_NODE,
)
from torchrun_controller.reconcile.model.plan import Delete
from unit.reconcile.failing import fail, running
from unit.reconcile.losing import running as running_on_nodes
from world import DEFAULTS, World, make_job, make_queue

LARGE = DEFAULTS.large_gang + 1  # nodes


def failed() -> World:
    """A large gang with one failed pod. The others run, and the controller has not seen it yet."""
    world = running(nodes=LARGE + 1)
    fail(world)
    return world


def ended() -> World:
    """A large gang that has failed, and whose pods are gone. The Job controller counts them."""
    world = failed()
    world.settle()
    world.containers_stop()
    world.settle()
    return world


def start(world: World) -> str:
    """The start annotation in the pod template of the last Job."""
    annotations = world.templates[world.gangs[-1].metadata.uid]["metadata"]["annotations"]
    return str(annotations.get(names.START, ""))


def test_one_request_deletes_the_survivors() -> None:
    world = failed()
    plan = world.step()
    child = world.gangs[-1].metadata
    assert plan.deletes == (
        Delete(
            kind=PODS,
            namespace="ml",
            name=child.name,
            uid=child.uid,
            grace_seconds=5,
            collection=True,
        ),
    )
    assert plan.applies == ()
    assert sum(pod.metadata.terminating for pod in world.workers()) == LARGE
    assert world.plan().deletes == ()


def test_a_pod_that_is_being_deleted_keeps_its_grace_period() -> None:
    world = running(nodes=LARGE + 2)
    drained = world.workers()[1]
    world.drain(drained.metadata.name)
    fail(world)
    deletes = world.step().deletes
    assert not any(delete.collection for delete in deletes)
    assert len(deletes) == LARGE
    assert drained.metadata.name not in {delete.name for delete in deletes}


def test_few_survivors_are_deleted_one_by_one() -> None:
    world = running(nodes=LARGE)
    fail(world)
    deletes = world.step().deletes
    names_of_survivors = {f"train-{index}-abcde" for index in range(1, LARGE)}
    assert {delete.name for delete in deletes} == names_of_survivors
    assert not any(delete.collection for delete in deletes)


def test_the_next_gang_starts_without_a_gate_when_the_job_has_failed() -> None:
    world = ended()
    reason, message = world.job.status.reason, world.job.status.message
    assert (reason, world.phase) == ("WaitingForOldGang", "Queued")
    assert message.startswith("Waiting for the pods of attempt 0 to terminate. ")
    assert len(world.gangs) == 1
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    assert [gang.metadata.name for gang in world.gangs] == ["train", "train-r1"]
    assert start(world) == "1"
    assert (world.job.status.restarts, world.job.status.attempt) == (1, 1)
    assert [attempt.number for attempt in world.job.status.attempts] == [0]


def test_the_wait_is_limited() -> None:
    world = ended()
    limit = (LARGE_GANG_WAIT + (LARGE + 1) * LARGE_GANG_WAIT_PER_NODE).total_seconds()
    assert world.plan().requeue_after == limit
    world.pass_time(seconds=limit - 1)
    world.settle()
    assert len(world.gangs) == 1
    world.pass_time(seconds=1)
    world.settle()
    assert len(world.gangs) == 2
    assert start(world) == "", (
        "its pods wait at the gate, which opens as their cache shows no other"
    )


def test_a_pod_that_still_runs_keeps_the_gate_closed_whatever_the_job_says() -> None:
    world = failed()
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.settle()
    assert len(world.gangs) == 1, "the cache of the pods is behind that of the Jobs"


def test_nobody_waits_for_lost_nodes() -> None:
    world = running_on_nodes(nodes=LARGE)
    world.node("node-1", False)
    world.pass_time(seconds=40)
    world.settle()
    assert len(world.gangs) == 2
    assert start(world) == ""
    assert world.job.status.unfenced


def test_a_gang_that_failed_for_good_ends_by_one_request_too() -> None:
    world = running(LARGE + 1, maxRestarts=0)
    fail(world)
    plan = world.step()
    assert world.phase == "Failed"
    assert [delete.collection for delete in plan.deletes] == [True]


def test_survivors_of_an_older_gang_end_by_one_request() -> None:
    world = failed()
    status = world.plan().status
    assert status is not None
    world.write_status(status)  # and the process dies before the delete
    world.pass_time(hours=1)
    world.step(writes=len(world.plan().applies))  # and again
    assert len(world.gangs) == 2
    deletes = world.step().deletes
    assert [(delete.uid, delete.collection) for delete in deletes] == [
        (world.gangs[0].metadata.uid, True)
    ]


def test_a_deleted_job_is_not_waited_for() -> None:
    world = failed()
    world.delete_child_job()
    world.settle()
    assert [key for key in world.created if key[0] == JOBS.plural] == [
        (JOBS.plural, "train"),
        (JOBS.plural, "train-r1"),
    ]


@pytest.mark.parametrize("nodes", [2, LARGE - 1])
def test_a_small_gang_is_replaced_at_once(nodes: int) -> None:
    world = World(make_job(numNodes=nodes), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    fail(world)
    world.settle()
    assert len(world.gangs) == 2


def test_a_small_gang_that_has_failed_needs_no_gate_either() -> None:
    world = World(make_job(numNodes=2, reliability={"maxRestarts": 5}), make_queue())
    world.settle()
    for _ in range(2):  # the second failure in a row has a back-off
        world.all_workers("Running")
        world.settle()
        fail(world)
        world.settle()
        world.containers_stop()
        world.settle()
    assert len(world.gangs) == 2
    world.job_condition("Failed", "BackoffLimitExceeded")
    world.pass_time(minutes=5)
    world.settle()
    assert (len(world.gangs), start(world)) == (3, "2")
