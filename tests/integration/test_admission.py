"""Admission on a real API server: quotas, order of queues and preemption, with kwok."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.controller_process import Api, ControllerProcess, eventually
from integration.kwok import STAGES, playing
from integration.queue_history import QueueHistory, assert_quotas_held
from integration.team import Team
from torchrun_cluster import LocalCluster, Size

HERE = Path(__file__).parent
NODES = "/api/v1/nodes"
SIZE = 24  # each has room for one worker
QUEUES = {f"team-{number}": quota for number, quota in enumerate((1, 2, 3, 3, 4, 5, 6, 8))}
ENDS_WELL = {"labels": {"ends": "well"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    name = f"test-admission-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE, scheduler=True) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _kwok(cluster: LocalCluster, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for number in range(SIZE):
        api.create(NODES, {"metadata": {"name": f"node-{number}", "labels": {"heart": "beats"}}})
    with playing(
        cluster,
        tmp_path_factory.mktemp("kwok"),
        "--manage-nodes-with-label-selector",
        "heart=beats",
        stages=(STAGES, HERE / "kwok_ends.yaml"),
    ):
        yield


@pytest.fixture
def controller(cluster: LocalCluster, tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(cluster, tmp_path, "--leader-election", "false").running() as process:
        yield process


@contextmanager
def recorded(api: Api, team: Team) -> Iterator[QueueHistory]:
    with QueueHistory(api.client, team.name).running() as history:
        yield history


def make_queue(team: Team, name: str, **spec: object) -> None:
    body = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunQueue",
        "metadata": {"name": name},
        "spec": {"image": "trainer:1", "nodeResources": {"cpus": 1}, **spec},
    }
    team.api.create(f"{team.group}/torchrunqueues", body)


def queue(team: Team, name: str) -> dict[str, Any]:
    status: dict[str, Any] = team.api.get(f"{team.group}/torchrunqueues/{name}").get("status", {})
    return status


def admitted(status: dict[str, Any]) -> dict[str, Any] | None:
    return next((c for c in status.get("conditions", ()) if c["type"] == "Admitted"), None)


def wait_admission(team: Team, job: str, reason: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        condition = admitted(team.status(job))
        return condition if condition and condition["reason"] == reason else None

    return eventually(f"{job}: {reason}", look)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("jobs", [60, pytest.param(200, marks=pytest.mark.long)])
def test_quotas_hold_at_any_time_while_the_controller_is_killed(
    controller: ControllerProcess, api: Api, jobs: int
) -> None:
    """Many jobs in eight queues, whose quotas exceed the number of nodes in total."""
    team = Team(api)
    chance = random.Random(7)
    for name, quota in QUEUES.items():
        make_queue(team, name, quota={"nodes": quota}, weight=1 + quota % 3)
    with recorded(api, team) as history:
        for number in range(jobs):
            name, quota = chance.choice(list(QUEUES.items()))
            nodes = chance.randint(1, min(3, quota))
            priority = chance.choice((0, 0, 0, 5))
            spec = {"jobQueue": name, "numNodes": nodes, "priority": priority, **ENDS_WELL}
            team.submit(f"job-{number}", **spec)
            if number in (jobs * 3 // 10, jobs * 3 // 4):
                controller.kill()
                controller.start()
        for done in (jobs // 5, jobs * 3 // 5):
            eventually("so many have ended", lambda done=done: len(_ended(history)) >= done, 240)
            controller.kill()
            controller.start()
        eventually("all have ended", lambda: len(_ended(history)) == jobs, 300)
        eventually("nothing is charged", lambda: not _charged(team))
    most = assert_quotas_held(history, QUEUES)
    gave_way = {s["metadata"]["name"] for s in history.jobs.states() if _gave_way(s)}
    print(f"most nodes at once: {most}; {len(gave_way)} jobs gave way")
    assert sum(most.values()) > SIZE // 2, "the test had jobs to admit"
    made_twice = [name for name, uids in history.gangs.uids().items() if len(uids) > 1]
    assert made_twice == []


def _ended(history: QueueHistory) -> set[str]:
    states = history.jobs.states()
    return {
        state["metadata"]["name"]
        for state in states
        if state.get("status", {}).get("phase") == "Succeeded"
    }


def _charged(team: Team) -> list[str]:
    jobs = team.api.items(f"{team.group}/torchrunjobs")
    return [job["metadata"]["name"] for job in jobs if "admission" in job["status"]]


def _gave_way(state: Any) -> bool:
    return bool(state.get("status", {}).get("phase") == "Preempted")


def test_a_job_of_higher_priority_preempts_another(controller: ControllerProcess, api: Api) -> None:
    team = Team(api)
    make_queue(team, "lab", quota={"nodes": 4})
    with recorded(api, team) as history:
        team.submit("usual", jobQueue="lab", numNodes=3)
        team.reaches("usual", "Running")
        # Its name sorts after "usual": jobs of the same second are ordered by name.
        team.submit("waiting", jobQueue="lab", numNodes=2)
        waits = eventually("the second waits", lambda: admitted(team.status("waiting")))
        assert waits["status"] == "False"
        assert team.status("waiting")["queuePosition"] == 1
        eventually(
            "it says why",
            lambda: (
                team.status("waiting").get("message") == admitted(team.status("waiting"))["message"]
            ),
        )
        assert queue(team, "lab")["admission"]["summary"] == "3/4 nodes"
        team.submit("urgent", jobQueue="lab", numNodes=4, priority=10)
        team.reaches("urgent", "Running")
        status = team.reaches("usual", "Preempted", "WaitingForAdmission")
        assert status["attempts"][0]["reason"] == "Preempted"
        assert (status.get("restarts", 0), status.get("disruptions", 0)) == (0, 0)
        assert "admission" not in status
        team.api.patch(f"{team.group}/torchrunjobs/urgent", {"spec": {"suspend": True}})
        team.reaches("usual", "Running")
        team.reaches("urgent", "Suspended")
        assert "admission" not in eventually(
            "urgent gave back", lambda: (s := team.status("urgent")) and not admitted(s) and s
        )
    assert_quotas_held(history, {"lab": 4})


def test_a_paused_queue_and_a_queue_without_admission(
    controller: ControllerProcess, api: Api
) -> None:
    team = Team(api)
    make_queue(team, "closed", weight=0)
    make_queue(team, "open")
    team.submit("held", jobQueue="closed", numNodes=1)
    team.submit("free", jobQueue="open", numNodes=1)
    team.reaches("free", "Running")
    assert admitted(team.status("free")) is None
    wait_admission(team, "held", "QueuePaused")
    api.patch(f"{team.group}/torchrunqueues/closed", {"spec": {"weight": 1}})
    team.reaches("held", "Running")
    assert wait_admission(team, "held", "Admitted")["message"] == "Admitted for 1 node."
    api.patch(f"{team.group}/torchrunqueues/closed", {"spec": {"weight": None}})
    eventually("the admission status is removed", lambda: admitted(team.status("held")) is None)
    team.reaches("held", "Running")
    api.patch(f"{team.group}/torchrunqueues/closed", {"spec": {"quota": {"nodes": 1}}})
    wait_admission(team, "held", "Admitted")


def test_an_edit_of_an_admitted_job_cannot_exceed_the_quota(
    controller: ControllerProcess, api: Api
) -> None:
    team = Team(api)
    make_queue(team, "lab", quota={"cpu": 1})
    team.submit("train", jobQueue="lab", nodeResources={"cpus": "500m"})
    admission = team.reaches("train", "Running")["admission"]
    assert (admission["queue"], admission["nodes"]) == ("lab", 2)
    assert admission["requests"]["cpu"] == "500m"

    job = f"{team.group}/torchrunjobs/train"
    generation = api.patch(job, {"spec": {"nodeResources": {"cpus": 1}}})["metadata"]["generation"]
    # Otherwise the end of the gang may be seen before the edit: the next gang is as the one before.
    eventually("the edit is seen", lambda: team.status("train")["observedGeneration"] == generation)
    for name in team.children("jobs", "train"):
        api.delete(f"{team.batch}/jobs/{name}?propagationPolicy=Background")
    refused = wait_admission(team, "train", "ExceedsQuota")
    assert refused["status"] == "False"
    assert "The quota of queue lab is 1 CPU in total." in refused["message"]
    eventually("the gang is gone", lambda: not team.children("jobs", "train"))
    assert "admission" not in team.status("train")

    api.patch(job, {"spec": {"nodeResources": {"cpus": "500m"}}})
    assert team.reaches("train", "Running")["admission"]["requests"]["cpu"] == "500m"
