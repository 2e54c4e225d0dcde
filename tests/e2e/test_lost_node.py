"""A machine that is off, as an administrator reports it; test_nodes.py has silent nodes, which take minutes."""

import pytest

from e2e.manifests import job
from e2e.nodes import placed, silent
from e2e.space import Space
from torchrun_api.kinds.resources import TORCHRUN_JOBS
from torchrun_cluster import LocalCluster

LASTS = "import os, time; time.sleep(0 if int(os.environ['TORCHRUN_ATTEMPT']) else 600)"
# Other pods of the node stay. With the effect NoExecute they would leave it.
OFF = "node.kubernetes.io/out-of-service=nodeshutdown:NoSchedule"


@pytest.mark.nodes(2)
def test_the_gang_of_a_machine_that_is_off_restarts_on_another(
    space: Space, local: LocalCluster
) -> None:
    lost = local.nodes[1].name
    others = [node.name for node in local.nodes if node.name != lost]
    space.kubectl("cordon", *others)
    try:
        space.apply(job("train", "plain", ["python3", "-c", LASTS]))
        space.wait_phase("train", "Running")
    finally:
        space.kubectl("uncordon", *others)
    assert placed(space, "train") == {0: lost}
    with silent(local, lost, "kubelet"):
        space.kubectl("taint", "node", lost, OFF)
        try:
            status = space.wait_phase("train", "Succeeded")
            # Its pod is still there, because the kubelet cannot confirm its end.
            assert placed(space, "train", 0) == {0: lost}
            assert placed(space, "train", 1)[0] in others
        finally:
            space.kubectl("taint", "node", lost, f"{OFF}-")
    assert status["attempts"][0]["reason"] == "NodeLost"
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)
    assert "unfenced" not in space.get(TORCHRUN_JOBS, "train")["status"]
