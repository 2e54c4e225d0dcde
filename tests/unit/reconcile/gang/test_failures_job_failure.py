"""Jobs that fail although no pod in the cache shows why."""

import pytest

from unit.reconcile.failing import running
from world import World, make_job, make_queue


def job_failed(world: World) -> None:
    """The Job has failed, and the cache shows none of its pods."""
    world.vanish(*(pod.metadata.name for pod in world.workers()))
    world.job_condition("Failed", "BackoffLimitExceeded", last_transition_time=world.now)


def starting() -> World:
    """The status shows two pods that have not started."""
    world = World(make_job(numNodes=2), make_queue())
    world.settle()
    return world


def counts(world: World) -> tuple[int, int]:
    return world.job.status.restarts, world.job.status.disruptions


@pytest.mark.parametrize("behind", [0, 300])
def test_pods_that_the_cache_has_not_shown_are_awaited(behind):
    world = starting()
    world.pass_time(seconds=behind)
    job_failed(world)
    world.pass_time(seconds=-behind)
    plan = world.step()
    assert (plan.applies, plan.requeue_after) == ((), 70)
    assert counts(world) == (0, 0)


def test_pods_that_were_never_seen_to_run_may_have_failed():
    world = starting()
    job_failed(world)
    world.pass_time(seconds=70)
    world.step()
    assert counts(world) == (1, 0)


def test_pods_that_ran_and_are_gone_were_removed():
    world = running()
    job_failed(world)
    world.step()
    assert counts(world) == (0, 1)


def test_a_pod_that_runs_in_the_cache_is_awaited():
    world = running()
    world.job_condition("Failed", "BackoffLimitExceeded", last_transition_time=world.now)
    assert world.step().requeue_after == 70
    world.pass_time(seconds=70)
    world.step()
    assert counts(world) == (1, 0)
