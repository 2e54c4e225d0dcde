"""Regression tests for the bugs that injected faults have found."""

import asyncio

import pytest

from faults import campaign
from faults.cluster import JOBS
from faults.faults import Point
from faults.scripts import well
from faults.simulation import NAMESPACE, Scenario, Simulation, simulate

CASES = {
    "a dead watch of Jobs makes no gang beside a gang": (
        "success",
        "event ADDED jobs/train",
        "watch-delayed",
    ),
    "a new leader that lags makes no gang beside a gang": (
        "leader",
        "event ADDED jobs/train",
        "watch-stale",
    ),
    "a job that is gone is not started again": (
        "delete",
        "event DELETED torchrunjobs/train",
        "watch-delayed",
    ),
    "a root cause is not lost with a status": (
        "restart",
        "write DELETE pods/train-0-abcde",
        "429",
    ),
    "a pod's word beats its Job's": (
        "restart",
        "event MODIFIED pods/train-1-abcde",
        "watch-compacted",
    ),
    "a workspace is told of with a later status": (
        "success",
        "write PATCH torchrunjobs/train/status",
        "500",
    ),
    "a policy's refusal is not for ever": (
        "success",
        "write PATCH services/train",
        "422",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_found_by_one_fault(case: str) -> None:
    scenario, what, kind = CASES[case]
    points = [point for point in campaign.points(scenario) if point.what == what]
    assert points, "the scenario has no such point any more"
    for point in points:
        assert campaign.judge(campaign.Trial(scenario, ((point, kind),))) == []


async def _gang_deleted(world: Simulation) -> None:
    world.make_queue()
    world.submit()
    await world.reaches("Queued")
    await asyncio.sleep(0.5)
    child = world.store.get(JOBS, (NAMESPACE, "train"))
    assert child is not None
    world.hands.delete(JOBS, child.body)
    await world.reaches("Succeeded", attempt=1)


def test_two_gangs_do_not_train_while_the_watch_of_pods_is_late() -> None:
    late = {Point("event ADDED pods/train-0-abcde", 1): "watch-delayed"}
    found = simulate(Scenario("gang deleted", _gang_deleted, well), late)
    assert found.struck
    assert found.wrong == []
