"""The reference scenarios of the simulation on a real API server, with one fault in each run.

For a random sample of any size, run: RUNS=100 SEED=1 make faults-proxied.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.faults import Point
from faults.scenarios import SCENARIOS, well
from faults.simulation import Scenario, Simulation
from integration import proxied_world
from integration.audit import AuditLog
from integration.controller_process import Api, install_crds
from integration.proxied_faults import OF_EVENTS, OF_REQUESTS
from integration.proxied_world import Outcome
from torchrun_cluster import LocalCluster, Size

PLAYED = ("success", "restart", "suspend", "scale", "delete", "queue", "leader")
SAMPLE = int(os.environ.get("TORCHRUN_PROXIED", "12"))
FEW = (
    ("success", Point("write PATCH jobs/train", 1), "dropped"),
    ("restart", Point("write PATCH jobs/train-r1", 1), "crash-after-commit"),
)


@pytest.fixture(scope="module")
def cluster(audit: AuditLog) -> Iterator[LocalCluster]:
    extra = {"kube-apiserver": audit.flags}
    name = f"test-proxied-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE, extra_args=extra) as running:
        install_crds(running)
        yield running


def points(of: Outcome) -> list[Point]:
    """The points of a scenario; of recurring requests, only the first."""
    recurring = ("lease ", "review ", "event MODIFIED leases", "watch GET /apis", "watch WATCH")
    return [p for p in of.points if p.number == 1 or not p.what.startswith(recurring)]


class Stage:
    """Plays scenarios, and each once without a fault for comparison."""

    def __init__(self, cluster: LocalCluster, api: Api, audit: AuditLog, folder: Path) -> None:
        self._with = (cluster, api, audit)
        self._folder = folder
        self._usual: dict[str, Outcome] = {}
        self._runs = 0

    def usual(self, scenario: str) -> Outcome:
        if scenario not in self._usual:
            self._usual[scenario] = self.play(SCENARIOS[scenario])
            assert self._usual[scenario].wrong == []
        return self._usual[scenario]

    def judge(self, scenario: str, at: Point, kind: str) -> tuple[bool, list[str]]:
        """Whether the fault was injected, and the violations."""
        usual = self.usual(scenario)
        found = self.play(SCENARIOS[scenario], at=at, kind=kind, wanted=usual.state)
        wrong = list(found.wrong)
        if found.writes > 2 * usual.writes:
            wrong.append(f"{found.writes} writes in the place of {usual.writes}")
        return found.struck, wrong

    def play(self, scenario: Scenario, **fault: Any) -> Outcome:
        self._runs += 1
        folder = self._folder / str(self._runs)
        return proxied_world.play(*self._with, folder, scenario, **fault)


@pytest.fixture(scope="module")
def stage(
    cluster: LocalCluster, api: Api, audit: AuditLog, tmp_path_factory: pytest.TempPathFactory
) -> Stage:
    return Stage(cluster, api, audit, tmp_path_factory.mktemp("runs"))


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "at", "kind"), FEW, ids=[each[2] for each in FEW])
def test_a_write_without_a_response(stage: Stage, scenario: str, at: Point, kind: str) -> None:
    struck, wrong = stage.judge(scenario, at, kind)
    assert struck
    assert wrong == []


async def head(world: Simulation) -> None:
    world.make_queue()
    world.submit(numNodes=3, head={"nodeResources": {"cpus": "100m"}})
    await world.reaches("Succeeded")


@pytest.mark.parametrize("step", ["before", "after-commit"])
def test_a_crash_between_the_two_jobs_of_a_gang(stage: Stage, step: str) -> None:
    """The Job of the workers exists, and the process dies before or after it creates the head's."""
    at = Point("write PATCH jobs/train", 1)
    found = stage.play(Scenario("head", head, well), at=at, kind=f"crash-{step}")
    assert found.struck
    assert found.wrong == []
    jobs = sorted(name for name in found.state if name.startswith("jobs/"))
    next_attempt = ["jobs/train-r1", "jobs/train-r1-w"]
    assert jobs == (next_attempt if step == "before" else ["jobs/train", "jobs/train-w"])


@pytest.mark.long
@pytest.mark.timeout(0)
def test_single_faults_at_random_points(stage: Stage) -> None:
    seed = int(os.environ.get("TORCHRUN_TEST_SEED", random.randrange(2**32)))
    print(f"TORCHRUN_TEST_SEED={seed}")
    chance, failed, struck = random.Random(seed), {}, 0
    for number in range(SAMPLE):
        scenario = PLAYED[number % len(PLAYED)]
        at = chance.choice(points(stage.usual(scenario)))
        kind = chance.choice(sorted(OF_EVENTS if at.is_event else OF_REQUESTS))
        met, wrong = stage.judge(scenario, at, kind)
        struck += met
        print(
            f"{scenario}: {kind} at {at}{'' if met else ', not met'}",
            *wrong,
            sep="\n    ",
            flush=True,
        )
        if wrong:
            failed[f"{scenario}: {kind} at {at}"] = wrong
    print(f"{SAMPLE} runs, {struck} with a fault")
    assert not failed
