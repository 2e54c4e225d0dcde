"""Conditions that follow one another while a job waits."""

from torchrun_controller.reconcile.model.observed import Rejection
from world import ZIP, World, make_job, make_queue


def running_condition(world: World) -> list[tuple[str, str]]:
    conditions = world.job.status.conditions
    return [(c.status, c.reason) for c in conditions if c.type == "Running"]


def test_a_refusal_that_is_over_leaves_no_condition() -> None:
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    world.rejections = (Rejection("persistentvolumeclaims", "train-workspace", "denied"),)
    world.settle()
    assert running_condition(world) == [("False", "Rejected")]
    world.rejections = ()
    world.settle()
    assert world.phase == "Syncing"
    assert running_condition(world) == []


def test_a_gang_that_ends_stays_running_until_its_pods_are_gone() -> None:
    world = World(make_job(numNodes=1), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.spec(suspend=True)
    world.settle()
    assert world.phase == "Running"
    assert running_condition(world) == [("True", "WorkersRunning")]
