"""Gangs under the real Volcano, on GPU nodes of kwok and on one real node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import gpus, rivals
from e2e.cluster import Cluster
from e2e.manifests import job
from e2e.space import Space
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]
NODES = 4
VOLCANO = {"scheduler": "volcano", "gang": "volcano"}
POD_GROUPS = "podgroups.scheduling.volcano.sh"


@pytest.fixture(scope="module", autouse=True)
def _volcano(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    log = tmp_path_factory.mktemp("kwok") / "log"
    with gpus.installed(cluster, "volcano"), gpus.nodes(cluster, NODES, log):
        yield


def gang(name: str, nodes: int, **spec: object) -> dict:
    return job(name, "gpus", "train", nodes, **spec)


def test_a_gang_starts_no_pod_until_it_fits(space: Space, cluster: Cluster):
    space.apply(gpus.gpu_queue("gpus", VOLCANO), gang("large", NODES + 1), gang("small", NODES))
    with space.history(PODS) as pods:
        # Meanwhile other jobs use all nodes, so the scheduler had an opportunity.
        space.wait_phase("small", "Running")
        status = space.wait_reason("large", "Unschedulable")
        assert status["phase"] == "Queued"
        assert "minAvailable" in status["message"]
        gpus.end(space, "small", "Succeeded")
        space.wait_phase("small", "Succeeded")
        space.apply(gang("next", NODES))
        space.wait_phase("next", "Running")
        gpus.end(space, "next", "Succeeded")
        space.wait_phase("next", "Succeeded")
        assert not gpus.bound(pods, "large")

        gpus.add_node(cluster, NODES)
        space.wait_phase("large", "Running")
        assert len(gpus.bound(pods, "large")) == NODES + 1
    cluster.kubectl("delete", "node", f"fake-gpus-{NODES}")


def test_two_gangs_that_each_need_all_nodes_run_one_after_the_other(space: Space):
    with space.history(PODS) as pods:
        space.apply(gpus.gpu_queue("gpus", VOLCANO), gang("left", NODES), gang("right", NODES))
        with space.history(TORCHRUN_JOBS) as jobs:
            first = jobs.until(running)
            second = "right" if first == "left" else "left"
            assert not gpus.bound(pods, second)
            gpus.end(space, first, "Succeeded")
            space.wait_phase(second, "Running")
            gpus.end(space, second, "Succeeded")
            space.wait_phase(second, "Succeeded")
        gpus.assert_never_together(pods, "left", "right")
        for name in ("left", "right"):
            assert len(gpus.bound(pods, name)) == NODES


def running(state: dict) -> str | None:
    return state["metadata"]["name"] if state.get("status", {}).get("phase") == "Running" else None


def test_a_failed_gang_restarts_completely(space: Space):
    space.apply(gpus.gpu_queue("gpus", VOLCANO))
    gpus.assert_a_failed_gang_restarts(space, "gpus", POD_GROUPS, NODES)


def test_real_pods_train_under_volcano(space: Space, tmp_path: Path):
    gpus.assert_real_pods_train(space, tmp_path, VOLCANO)


def test_a_restart_in_place_keeps_the_nodes_from_a_gang_that_waits(space: Space):
    rivals.apply_queue(space, VOLCANO)
    rivals.assert_a_restart_in_place_keeps_the_nodes(space, "real", "Unschedulable")
