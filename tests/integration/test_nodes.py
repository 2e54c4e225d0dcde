"""Lost machines: kwok's nodes under the real scheduler, Job, node lifecycle and pod GC controllers.

kwok ignores a node without the label `heart`: it sends no heartbeats, and its pods keep running.
"""

import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from integration.controller_process import Api, ControllerProcess, eventually, install_crds
from integration.kwok import playing
from integration.team import Team
from torchrun_api import names
from torchrun_cluster import LocalCluster, Size

NODES = "/api/v1/nodes"
SIZE = 8  # each has room for one worker
GRACE = 6.0  # seconds without a heartbeat until NotReady
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    lifecycle = ["--node-monitor-period=1s", f"--node-monitor-grace-period={GRACE:.0f}s"]
    with LocalCluster(
        name=f"test-nodes-{os.getpid()}",
        size=Size.CONTROL_PLANE,
        scheduler=True,
        extra_args={"kube-controller-manager": lifecycle},
    ) as running:
        install_crds(running)
        yield running


@pytest.fixture(scope="module", autouse=True)
def _kwok(cluster: LocalCluster, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for number in range(SIZE):
        labels = {"heart": "beats", "kubernetes.io/hostname": f"host-{number}"}
        api.create(NODES, {"metadata": {"name": f"node-{number}", "labels": labels}})
    with playing(
        cluster,
        tmp_path_factory.mktemp("kwok"),
        "--manage-nodes-with-label-selector",
        "heart=beats",
        lease_seconds=4,
    ):
        yield


def workers(team: Team, job: str, attempt: int) -> list[Any]:
    labels = (
        f"{names.JOB_LABEL}={job}",
        f"{names.COMPONENT_LABEL}={names.WORKER}",
        f"{names.ATTEMPT_LABEL}={attempt}",
    )
    return team.api.items(f"{team.core}/pods", ",".join(labels))


def started(pods: list[Any]) -> bool:
    return any(names.START in pod["metadata"].get("annotations", {}) for pod in pods)


def ready(api: Api, node: str) -> dict[str, Any]:
    conditions = api.get(f"{NODES}/{node}")["status"]["conditions"]
    found: dict[str, Any] = next(c for c in conditions if c["type"] == "Ready")
    return found


def seconds(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def test_gangs_of_lost_nodes_are_replaced_in_time_and_wait_for_the_fence(
    controller: ControllerProcess, api: Api
) -> None:
    team = Team(api)
    team.make_queue()
    for job in ("unheard", "deleted"):
        team.submit(job, reliability={"maxRestarts": 0})
    for job in ("unheard", "deleted"):
        team.reaches(job, "Running")
    lost = {job: workers(team, job, 0)[0] for job in ("unheard", "deleted")}
    nodes = {job: pod["spec"]["nodeName"] for job, pod in lost.items()}
    for node in nodes.values():
        api.patch(f"{NODES}/{node}", {"metadata": {"labels": {"heart": None}}})

    eventually("NotReady", lambda: ready(api, nodes["unheard"])["status"] == "Unknown")
    since = ready(api, nodes["unheard"])["lastTransitionTime"]
    api.delete(f"{NODES}/{nodes['deleted']}")

    for job in ("unheard", "deleted"):
        eventually(f"{job}'s next gang", lambda job=job: len(workers(team, job, 1)) == 2)
        status = team.reaches(job, "Queued", "WaitingForFence")
        assert status["attempts"][0]["reason"] == "NodeLost"
        assert (status.get("restarts", 0), status["disruptions"]) == (0, 1)
        assert status["lastFailure"]["node"] == nodes[job]
        assert [worker["node"] for worker in status["unfenced"]] == [nodes[job]]
        assert not started(workers(team, job, 1))
    made = [pod["metadata"]["creationTimestamp"] for pod in workers(team, "unheard", 1)]
    took = max(seconds(since, time) for time in made)
    print(f"all pods of the new gang {took:.0f} s after NotReady")
    assert took <= 100  # 40 s until the node counts as lost, plus time for a busy machine

    # A force-delete stops no container, and a restarted controller respects that.
    for pod in lost.values():
        path = f"{team.core}/pods/{pod['metadata']['name']}"
        answer = api.client.delete(f"{path}?gracePeriodSeconds=0")
        # 404: the pod garbage collector force-deletes the pods of a deleted node 40 s later.
        assert answer.status_code in (200, 404), answer.text
    controller.kill()
    controller.start()
    controller.wait_for_line("machines are readable")
    for job in ("unheard", "deleted"):
        team.reaches(job, "Queued", "WaitingForFence")
        assert not started(workers(team, job, 1))

    taint = {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
    api.patch(f"{NODES}/{nodes['unheard']}", {"spec": {"taints": [taint]}})
    team.reaches("unheard", "Running")
    assert not started(workers(team, "deleted", 1))
    word = {"spec": {"reliability": {"allowUnfencedRestart": True}}}
    api.patch(f"{team.group}/torchrunjobs/deleted", word)
    team.reaches("deleted", "Running")
    assert all(team.status(job)["attempt"] == 1 for job in nodes)
