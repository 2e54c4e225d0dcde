"""A failed Job whose pods show no failure yet: how long the controller waits for their cache."""

import pytest

from unit.reconcile.failing import fail, running
from unit.reconcile.test_regressions import fail_now
from world import World, make_job, make_queue

PATIENCE = 70  # seconds, the wait for late pods


def starting(nodes: int = 1) -> World:
    """A gang whose pods are only visible as created."""
    world = World(make_job(numNodes=nodes), make_queue())
    world.settle()
    return world


def waits(world: World) -> bool:
    """Whether the gang still waits for its pods, for a limited time."""
    world.pass_backoff()
    plan = world.step()
    waits = not any(apply.name == "train-r1" for apply in plan.applies)
    assert not waits or 0 < (plan.requeue_after or 0) <= PATIENCE
    return waits


def test_ended_pods_are_not_waited_for():
    world = starting()
    assert world.job.status.workers.pending == 1
    world.all_workers("Succeeded")
    fail_now(world)
    assert not waits(world)


def test_a_pod_that_was_never_seen_to_start_is_waited_for():
    world = starting(nodes=2)
    first, second = world.workers()
    world.pod(first.metadata.name, phase="Succeeded")
    world.settle()
    assert world.job.status.workers.pending == 1
    fail_now(world)
    world.vanish(second.metadata.name)
    assert waits(world)


def test_a_pod_that_was_seen_and_removed_is_not_waited_for():
    world = starting(nodes=2)
    world.all_workers("Succeeded")
    world.settle()
    assert world.job.status.workers.pending == 0
    fail_now(world)
    world.vanish(world.workers()[1].metadata.name)
    assert not waits(world)


def test_an_unrecorded_gang_is_waited_for():
    world = running(1)
    fail(world)
    world.step(99)
    assert world.job.status.attempt == 0, "the status was not written"
    fail_now(world)
    for pod in world.workers():
        world.vanish(pod.metadata.name)
    plan = world.step()
    assert [apply.name for apply in plan.applies if apply.name == "train-r2"] == []
    assert 0 < plan.requeue_after <= PATIENCE


@pytest.mark.parametrize(("seconds", "expected"), [(PATIENCE - 1, True), (PATIENCE, False)])
def test_the_wait_has_an_end(seconds: int, expected: bool):
    world = starting()
    fail_now(world)
    world.vanish(world.workers()[0].metadata.name)
    assert waits(world)
    world.pass_time(seconds=seconds)
    assert waits(world) is expected
