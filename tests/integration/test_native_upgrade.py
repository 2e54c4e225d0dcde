"""Kubernetes is upgraded from 1.36 to 1.37 while gangs of kube-scheduler run.

etcd keeps the PodGroups of 1.36 in a version that 1.37 does not have. Nodes and containers are
kwok's.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from integration.controller_process import Api, ControllerProcess, eventually, install_crds
from integration.kwok import playing
from integration.native_gangs import GROUP, NATIVE
from integration.team import Team
from torchrun_cluster import LocalCluster, Size, state

NAME = f"test-native-upgrade-{os.getpid()}"
OLD, NEW = "1.36", "1.37"
NODES = [f"node-{number}" for number in range(4)]  # each with room for one worker
UNSAFE = "ignoreStoreReadErrorWithClusterBreakingPotential=true"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),  # it may build both releases
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        name=NAME,
        size=Size.CONTROL_PLANE,
        scheduler=True,
        kubernetes=OLD,
        extra_args=NATIVE[OLD].flags(),
    ) as running:
        install_crds(running)
        yield running


@pytest.fixture(scope="module", autouse=True)
def _kwok(cluster: LocalCluster, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for name in NODES:
        api.create("/api/v1/nodes", {"metadata": {"name": name}})
    with playing(cluster, tmp_path_factory.mktemp("kwok"), "--manage-all-nodes"):
        yield


def upgrade(cluster: LocalCluster) -> LocalCluster:
    """Replace the components of Kubernetes by those of the new release; etcd keeps running."""
    recorded = state.read(NAME)
    assert recorded is not None
    for component in reversed(recorded.components):
        if component != "etcd":
            cluster.stop(component)
    spec = replace(recorded.spec, kubernetes=NEW, extra_args=NATIVE[NEW].flags())
    replace(recorded, spec=spec).write()
    upgraded = LocalCluster.existing(NAME)
    # Unreadable objects delay it by a minute, and kube-controller-manager waits for 10 seconds.
    upgraded.start("kube-apiserver")
    upgraded.up()  # it starts what has ended
    return upgraded


def suspend(team: Team, job: str, value: bool) -> None:
    team.api.patch(f"{team.group}/torchrunjobs/{job}", {"spec": {"suspend": value}})


def group_names(team: Team, release: str) -> list[str]:
    return sorted(g["metadata"]["name"] for g in team.api.items(NATIVE[release].path(team.name)))


def test_groups_of_the_old_release_block_the_scheduler_until_they_are_deleted(
    cluster: LocalCluster, controller: ControllerProcess, team: Team
) -> None:
    for job in ("prepared", "forgotten"):
        team.submit(job, numNodes=2)
        team.reaches(job, "Running")
    suspend(team, "prepared", True)
    team.reaches("prepared", "Suspended")
    eventually("its group is gone", lambda: group_names(team, OLD) == ["forgotten"])

    upgraded = upgrade(cluster)

    every_group = (f"podgroups.{NATIVE[NEW].version}.{GROUP}", "--all-namespaces")
    error = upgraded.kubectl("get", *every_group, check=False).stderr
    assert f"podgroups/{team.name}/forgotten" in error
    assert f"{GROUP}/{NATIVE[OLD].version}" in error
    suspend(team, "prepared", False)
    pods = team.workers("prepared")
    lists = unreadable_groups(controller)
    eventually("the controller logs it", lambda: unreadable_groups(controller) > lists)
    # kube-scheduler starts only when it has a list of all PodGroups.
    bodies = [team.api.get(f"{team.core}/pods/{pod}") for pod in pods]
    assert not any(body["spec"].get("nodeName") for body in bodies)
    assert not any(body["status"].get("conditions") for body in bodies)
    status = team.status("forgotten")
    assert (status["phase"], status.get("restarts", 0)) == ("Running", 0)

    path = NATIVE[NEW].path(team.name)
    upgraded.kubectl("delete", "--raw", f"{path}/forgotten?{UNSAFE}")
    team.reaches("prepared", "Running")
    assert group_names(team, NEW) == ["prepared-r1"]

    first, *_ = team.workers("forgotten")
    team.pod_becomes(first, "Failed", "ValueError")
    eventually("a new attempt", lambda: team.status("forgotten").get("restarts") == 1)
    team.reaches("forgotten", "Running")
    assert group_names(team, NEW) == ["forgotten-r1", "prepared-r1"]


def unreadable_groups(controller: ControllerProcess) -> int:
    """The number of the controller's lists that have failed."""
    return sum(
        line["message"] == "list or watch interrupted"
        and line["resource"] == f"podgroups.{GROUP}"
        and f"{GROUP}/{NATIVE[OLD].version}" in line["error"]
        and "/forgotten" in line["error"]
        for line in controller.lines()
    )
