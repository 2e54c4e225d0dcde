"""Regression tests for the bugs that injected faults have found."""

import asyncio

import pytest

from bodies import Body
from faults import campaign
from faults.cluster import JOBS, PODS
from faults.faults import Point
from faults.nodes import End
from faults.scenarios_workspace import UPLOADED, ZIP, prepares
from faults.scripts import well
from faults.simulation import NAMESPACE, Scenario, Simulation, simulate
from torchrun_api import names

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
    "a ready workspace is shown with a later status": (
        "success",
        "write PATCH torchrunjobs/train/status",
        "500",
    ),
    "a refusal by a policy is retried": (
        "success",
        "write PATCH services/train",
        "422",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bugs_found_by_one_fault(case: str) -> None:
    scenario, what, kind = CASES[case]
    points = [point for point in campaign.points(scenario) if point.what == what]
    assert points, "the scenario no longer has this point"
    for point in points:
        assert campaign.judge(campaign.Trial(scenario, ((point, kind),))) == []


def test_a_new_leader_whose_cache_of_jobs_lags_makes_no_gang_beside_the_pods_that_it_sees() -> None:
    pair = (
        (Point("watch GET torchrunqueues", 2), "slow-etcd"),
        (Point("write PATCH torchrunqueues/gpu", 1), "outage"),
    )
    assert campaign.judge(campaign.Trial("leader", pair)) == []


@pytest.mark.parametrize("clock", ["clock-ahead", "clock-back"])
def test_the_failure_of_pods_that_were_not_seen_is_counted_although_the_clock_is_off(
    clock: str,
) -> None:
    pair = (
        (Point("write PATCH jobs/train", 1), clock),
        (Point("event ADDED pods/train-1-abcde", 1), "watch-unseen"),
    )
    assert campaign.judge(campaign.Trial("restart", pair)) == []


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
    result = simulate(Scenario("gang deleted", _gang_deleted, well), late)
    assert result.struck
    assert result.wrong == []


def _setup_stays_on_node_0(pod: Body) -> End | None:
    """As `prepares`, but a setup pod on node-0 goes on until it is deleted."""
    is_setup = pod["metadata"]["labels"][names.COMPONENT_LABEL] == names.SETUP
    stays = is_setup and pod["spec"].get("nodeName") == "node-0"
    return None if stays else prepares(pod)


async def _loses_setup(world: Simulation) -> None:
    world.make_queue()
    world.submit(volumes=ZIP, setupCommand="make", annotations_=UPLOADED)
    await world.until("the setup runs", lambda: _phase_of_setup(world) == "Running")
    world.nodes.lose("node-0")
    await world.reaches("Syncing", reason="SetupPodLost")
    world.nodes.switch_off("node-0")
    await world.reaches("Succeeded")


def _phase_of_setup(world: Simulation) -> str:
    pod = world.store.get(PODS, (NAMESPACE, "train-setup-0"))
    return "" if pod is None else pod.body.get("status", {}).get("phase", "")


def test_a_job_goes_on_once_the_lost_node_of_its_setup_pod_is_switched_off() -> None:
    result = simulate(Scenario("setup pod lost", _loses_setup, _setup_stays_on_node_0), {})
    assert result.wrong == []


async def _suspended(world: Simulation) -> None:
    """The next job may start only when no pod of the suspended one is left."""
    world.make_queue(quota={"jobs": 1})
    world.submit()
    await world.trains()
    world.edit(suspend=True)
    world.submit("later")
    await world.reaches("Suspended")
    await world.reaches("Succeeded", "later")
    world.edit(suspend=False)
    await world.reaches("Succeeded")


def _first_gang_of_train_stays(pod: Body) -> End | None:
    stays = pod["metadata"]["name"].startswith("train-0-") or "train-1-" in pod["metadata"]["name"]
    return None if stays else well(pod)


@pytest.mark.parametrize("kind", ["watch-delayed", "watch-unseen", "watches-lag"])
def test_a_suspended_job_whose_pods_the_cache_has_not_shown_keeps_its_charge(kind: str) -> None:
    unseen = {Point("event ADDED pods/train-0-abcde", 1): kind}
    result = simulate(Scenario("suspended", _suspended, _first_gang_of_train_stays), unseen)
    assert result.struck
    assert result.wrong == []
