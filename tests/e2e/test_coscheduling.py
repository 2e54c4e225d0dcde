"""Gangs under the real scheduler of coscheduling, on GPU nodes of kwok and on real nodes."""

from collections.abc import Iterator

import pytest

from e2e import gpus, rivals
from e2e.cluster import Cluster
from e2e.space import Space

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]
NODES = 4
COSCHEDULING = {"gang": "coscheduling"}
POD_GROUPS = "podgroups.scheduling.x-k8s.io"


@pytest.fixture(scope="module", autouse=True)
def _coscheduling(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    log = tmp_path_factory.mktemp("kwok") / "log"
    with gpus.installed(cluster, "coscheduling"), gpus.nodes(cluster, NODES, log):
        yield


def test_a_gang_that_does_not_fit_gets_no_node_and_smaller_ones_overtake_it(space: Space):
    space.apply(gpus.gpu_queue("gpus", COSCHEDULING))
    gpus.assert_smaller_gangs_overtake(space, "gpus", NODES)


def test_a_failed_gang_restarts_completely(space: Space):
    space.apply(gpus.gpu_queue("gpus", COSCHEDULING))
    gpus.assert_a_failed_gang_restarts(space, "gpus", POD_GROUPS, NODES)


def test_a_restart_in_place_keeps_the_nodes_from_a_gang_that_waits(space: Space):
    rivals.apply_queue(space, COSCHEDULING)
    rivals.assert_a_restart_in_place_keeps_the_nodes(space, "real", "Unschedulable")
