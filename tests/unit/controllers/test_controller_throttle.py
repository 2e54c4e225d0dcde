"""A job with a large gang is reconciled at intervals; other jobs at once."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import Pod
from torchrun_controller.client.write_errors import UnavailableError
from torchrun_controller.controllers.controller import Done, Postponed
from torchrun_controller.controllers.job import PODS_PER_SECOND, THROTTLED_PODS
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.plan import Plan, StatusWrite
from unit.controllers.neighbours import KEY, REJECTION, World, observed, status


def with_pods(workers: int, stale: int = 0) -> World:
    world = World()
    pods = ObservedGang(workers=(Pod(),) * workers, stale_pods=(Pod(),) * stale)
    world.present[KEY] = replace(observed("Running"), gang=pods)
    return world


async def test_a_large_gang_is_reconciled_once_in_an_interval() -> None:
    world = with_pods(PODS_PER_SECOND - 10, 10)
    assert await world.reconciler.attempt(KEY) == Done()
    world.time += 0.25
    assert await world.reconciler.attempt(KEY) == Postponed(0.75)
    assert len(world.observations) == 1
    world.time += 0.75
    assert await world.reconciler.attempt(KEY) == Done()
    assert len(world.observations) == 2


async def test_a_small_gang_is_reconciled_at_once() -> None:
    world = with_pods(THROTTLED_PODS)
    for _ in range(2):
        assert await world.reconciler.attempt(KEY) == Done()
    assert len(world.observations) == 2


async def test_a_failed_reconcile_counts_too() -> None:
    world = with_pods(2 * THROTTLED_PODS)
    world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Failed")),))
    world.failures = [RuntimeError(REJECTION.message)]
    with pytest.raises(RuntimeError):
        await world.reconciler.attempt(KEY)
    assert isinstance(await world.reconciler.attempt(KEY), Postponed)


async def test_a_replaced_job_is_reconciled_at_once() -> None:
    world = with_pods(2 * THROTTLED_PODS)
    await world.reconciler.attempt(KEY)
    world.time += 1
    del world.present[KEY]
    assert await world.reconciler.attempt(KEY) == Done()
    world.present[KEY] = observed("Running")
    assert await world.reconciler.attempt(KEY) == Done()
    assert len(world.observations) == 2


async def test_the_back_off_of_a_large_gang_grows() -> None:
    world = with_pods(2 * THROTTLED_PODS)
    world.plan = lambda _: Plan(writes=(StatusWrite(status=status("Failed")),))
    world.queue.add(KEY)
    for failures in range(1, 12):
        world.failures = [UnavailableError("500")]
        while world.queue.failures(KEY) < failures:  # its interval is longer than the back-off
            world.time += (world.queue.next_ready() or 0.0) + 0.001
            await world.attempts()
    assert world.queue.next_ready() == pytest.approx(0.005 * 2**10)
