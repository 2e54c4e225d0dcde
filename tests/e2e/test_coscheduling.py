"""Gangs under the real scheduler of coscheduling, on GPU nodes of kwok and on real nodes."""

from collections.abc import Iterator

import pytest

from e2e import gpus, rivals
from e2e.cluster import Cluster
from e2e.manifests import job, queue
from e2e.space import Space
from torchrun_api.kinds import PODS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]
NODES = 4
COSCHEDULING = {"gang": "coscheduling"}
POD_GROUPS = "podgroups.scheduling.x-k8s.io"


@pytest.fixture(scope="module", autouse=True)
def _coscheduling(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    log = tmp_path_factory.mktemp("kwok") / "log"
    with gpus.installed(cluster, "coscheduling"), gpus.nodes(cluster, NODES, log):
        yield


def gang(name: str, nodes: int, **spec: object) -> dict:
    return job(name, "gpus", "train", nodes, **spec)


def test_a_gang_that_does_not_fit_starts_no_pod_and_smaller_ones_overtake_it(space: Space):
    space.apply(gpus.gpu_queue("gpus", COSCHEDULING), gang("large", NODES + 1))
    with space.history(PODS) as pods:
        status = space.wait_reason("large", "Unschedulable")
        assert status["phase"] == "Queued"
        space.apply(gang("small", NODES))
        space.wait_phase("small", "Running")
        gpus.end(space, "small", "Succeeded")
        space.wait_phase("small", "Succeeded")
        assert len(gpus.bound(pods, "small")) == NODES
        assert not gpus.bound(pods, "large")


def test_a_failed_gang_restarts_completely(space: Space):
    space.apply(gpus.gpu_queue("gpus", COSCHEDULING))
    gpus.assert_a_failed_gang_restarts(space, "gpus", POD_GROUPS, NODES)


def test_a_restart_in_place_keeps_the_nodes_from_a_gang_that_waits(space: Space, cluster: Cluster):
    resources = rivals.more_than_half_a_node(cluster)
    image = cluster.controller
    space.apply(queue("real", image, nodeResources=resources, scheduling=COSCHEDULING))
    rivals.assert_a_restart_in_place_keeps_the_nodes(space, "real", "Unschedulable")
