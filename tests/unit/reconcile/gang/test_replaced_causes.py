"""The root cause of a gang that replaces pods: lost pods and their peers do not hide it."""

import pytest

from torchrun_api.kinds import PODS
from unit.reconcile import failing
from unit.reconcile.replacing import (
    counts,
    delete,
    evict,
    reasons,
    replace_lost,
    run,
    running,
    stop,
)
from world import World

PEER_FAILED = '{"exitCode": 1, "reason": "PeerFailed", "message": "The gang has ended."}'
EXCEPTION = '{"rank": 2, "exitCode": 1, "reason": "Exception", "message": "KeyError: 1"}'


def fail(world: World, index: int, message: str) -> None:
    name = world.workers()[index].metadata.name
    world.end_container(name, "trainer", exit_code=1, message=message, finished_at=world.now)


def cause(world: World) -> str:
    assert world.job.status.last_failure is not None
    return world.job.status.last_failure.reason


def test_a_recorded_loss_does_not_hide_why_the_job_failed():
    world = running(reliability={"maxRestarts": 0})
    evict(world, 1)
    world.settle()
    fail(world, 2, EXCEPTION)
    world.settle()
    assert world.phase == "Failed"
    assert (world.job.status.reason, cause(world)) == ("Exception", "Exception")


def lose_four_times(world: World) -> None:
    for seconds in (10, 20, 40):
        stop(world, 1)
        replace_lost(world, seconds)
        run(world)
    world._ending((PODS.plural, world.workers()[1].metadata.name), 30)
    world.containers_stop()


def lose_too_slowly(world: World) -> None:
    delete(world, 1)
    world.pass_time(seconds=90)


@pytest.mark.parametrize("lose", [lose_four_times, lose_too_slowly])
def test_a_lost_peer_is_not_the_cause_of_a_gang_that_a_loss_ends(lose):
    world = running()
    lose(world)
    for index in (0, 2):
        fail(world, index, PEER_FAILED)
    restarts = world.job.status.restarts
    world.settle()
    world.pass_time(seconds=10)
    world.settle()
    assert reasons(world)[-1] == (0, "PodDeleted")
    assert (cause(world), counts(world)[:2]) == ("PodDeleted", (1, restarts))


def test_a_peer_that_fails_later_does_not_hide_the_deletion_of_a_pod():
    world = failing.running(restartPolicy="Never")
    delete(world, 1)
    assert (world.phase, cause(world)) == ("Failed", "PodDeleted")
    fail(world, 0, PEER_FAILED)
    world.settle()
    assert (world.job.status.reason, cause(world)) == ("PodDeleted", "PodDeleted")
