"""The users' queues, unchanged: a job in each runs on nodes of the right size.

The real kube-scheduler places jobs of queues without a scheduler, and a simulated KAI the others.
Nodes and containers are kwok's.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.controller_process import Api, ControllerProcess, eventually, install_crds
from integration.kwok import playing
from integration.played_schedulers import Scheduler
from integration.scheduler_kinds import KAI_GROUPS, KAI_QUEUES, install
from integration.team import Team
from torchrun_cluster import LocalCluster, Size

MISSION = Path(__file__).parents[1] / "fixtures" / "mission"
NODES = [f"gpu-{number}" for number in range(4)]
ROOM = {"cpu": "128", "memory": "1Ti", "nvidia.com/gpu": "8", "pods": "110"}
KAI = "/apis/scheduling.run.ai/v2/queues"
GROUPS = "scheduling.run.ai/v2alpha2/namespaces/NS/podgroups"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    name = f"test-mission-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE, scheduler=True) as running:
        install_crds(running)
        yield running


@pytest.fixture(scope="module", autouse=True)
def _nodes(cluster: LocalCluster, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for name in NODES:
        labels = {"gpu.nvidia.com/class": "H100", "kubernetes.io/hostname": name}
        api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"}
        status = {"allocatable": ROOM, "capacity": ROOM, "conditions": [ready]}
        api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
    for name in ("gpu-priority", "production-priority"):
        body = {"metadata": {"name": name}, "value": 1000}
        api.create("/apis/scheduling.k8s.io/v1/priorityclasses", body)
    with playing(cluster, tmp_path_factory.mktemp("kwok"), "--manage-all-nodes"):
        yield


@pytest.fixture
def team(api: Api) -> Team:
    """A namespace without a queue."""
    return Team(api)


def make_queue(team: Team, name: str) -> None:
    """Create the queue of the documents. Another namespace must not use its KAI queue."""
    bodies = [
        body
        for path in MISSION.glob("queue*.yaml")
        for body in yaml.safe_load_all(path.read_text())
        if body["metadata"]["name"] == name
    ]
    assert len(bodies) == 1
    team.api.create(f"{team.group}/torchrunqueues", bodies[0])


def job(name: str) -> Any:
    return yaml.safe_load((MISSION / f"job-{name}.yaml").read_text())


@pytest.mark.parametrize(("queue", "gpus"), [("dev-queue", 4), ("prod-queue", 8)])
def test_a_queue_of_the_default_scheduler(
    controller: ControllerProcess, team: Team, queue: str, gpus: int
) -> None:
    make_queue(team, queue)
    team.submit("run", jobQueue=queue)
    status = team.reaches("run", "Running")
    assert status["gpus"] == 2 * gpus
    assert "NotYetSupported" not in {c["type"] for c in status["conditions"]}


def have_kai_queue(api: Api, name: str) -> None:
    """Create a parent queue, as KAI or an administrator does."""
    if api.get(f"{KAI}/{name}") is None:
        body = {
            "apiVersion": "scheduling.run.ai/v2",
            "kind": "Queue",
            "metadata": {"name": name},
            "spec": {"resources": {}},
        }
        api.create(KAI, body)


@pytest.mark.parametrize(
    ("name", "queue", "nodes"),
    [("training-job", "gpu-training", 2), ("vit-training", "gpu-h100-queue", 4)],
)
def test_a_queue_of_kai(
    controller: ControllerProcess,
    cluster: LocalCluster,
    team: Team,
    name: str,
    queue: str,
    nodes: int,
) -> None:
    install(cluster, KAI_QUEUES, KAI_GROUPS)
    for parent in ("default", "default-parent-queue"):
        have_kai_queue(team.api, parent)
    submitted = job(name)
    make_queue(team, submitted["spec"]["jobQueue"])
    team.api.create(f"{team.group}/torchrunjobs", submitted)
    kai = Scheduler(team, "kai-scheduler", GROUPS, ("annotations", "pod-group-name"), NODES)
    status = kai.until(name, "Running")
    assert (status["numNodes"], status["gpus"]) == (nodes, nodes * 8)
    messages = {c["type"]: c["message"] for c in status["conditions"]}
    assert "distributed.rdzvBackend is etcd-v2" in messages["NotYetSupported"]
    group = team.api.get(f"{kai.path}/{name}")
    assert (group["spec"]["minMember"], group["spec"]["queue"]) == (nodes, queue)
    path = f"{KAI}/{queue}"
    assert eventually("KAI's queue", lambda: team.api.get(path))["spec"]["parentQueue"]
    team.api.delete(f"{team.group}/torchrunjobs/{name}")
    team.api.delete(f"{team.group}/torchrunqueues/{submitted['spec']['jobQueue']}")
    eventually("it goes with the queue that names it", lambda: team.api.get(path) is None)
