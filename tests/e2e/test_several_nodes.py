"""What one node cannot show: a cut between two nodes, and code that reaches every node."""

import re
import time
from pathlib import Path

import pytest

from e2e.manifests import job, queue
from e2e.nodes import apart, cut, placed
from e2e.space import Space, until
from e2e.test_nodes import RESOURCES, submit
from e2e.test_reload import STEP, ended, log, plugin, ready, workers
from torchrun_api.kinds.resources import TORCHRUN_JOBS
from torchrun_cluster import LocalCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.nodes(3),
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.usefixtures("controller_on_the_first_node"),
]
CUT_SECONDS = 10
# The slowest step shows whether the ranks had to wait for each other.
TRAINS = """\
import os, time
import torch, torch.distributed as dist, torchrun_progress
dist.init_process_group("gloo")
slowest, steps = 0.0, 300 if os.environ["TORCHRUN_ATTEMPT"] == "0" else 20
for step in range(1, steps + 1):
    began = time.monotonic()
    dist.all_reduce(torch.ones(1))
    slowest = max(slowest, time.monotonic() - began)
    torchrun_progress.report(step=step, total=steps)
    print("step", step, flush=True)
    time.sleep(0.1)
print("slowest step", slowest, flush=True)
dist.destroy_process_group()
"""


def start_training(space: Space, directory: Path, nodes: tuple[str, str], **spec: object) -> None:
    """Train on these two nodes, until some steps are done."""
    settings = {"nodeResources": RESOURCES, "podTemplate": apart(*nodes), **spec}
    space.apply(queue("torch", space.cluster.trainer, **settings))
    options = ("--queue", "torch", "--nodes", "2", "--name", "train")
    submit(space, directory, TRAINS, "python3 run.py", *options)
    space.wait_phase("train", "Running")
    assert set(placed(space, "train").values()) == set(nodes)
    until(lambda: all("step 5\n" in log(space, pod) for pod in workers(space)), "some steps")


def test_ranks_wait_out_a_short_cut_between_their_nodes(
    space: Space, local: LocalCluster, tmp_path: Path
) -> None:
    _, one, other = (node.name for node in local.nodes)
    start_training(space, tmp_path, (one, other))
    with cut(local, one, other):
        time.sleep(CUT_SECONDS)
    status = space.wait_phase("train", "Succeeded", 300)
    assert (status.get("attempt", 0), status.get("restarts", 0)) == (0, 0)
    waits = [re.findall(r"slowest step (\S+)", log(space, pod)) for pod in workers(space)]
    print("the slowest steps took", waits)
    assert all(float(wait[0]) > CUT_SECONDS - 1 for wait in waits)


def test_a_long_cut_is_a_hang_and_the_next_gang_trains(
    space: Space, local: LocalCluster, tmp_path: Path
) -> None:
    _, one, other = (node.name for node in local.nodes)
    watch = {"hangTimeoutSeconds": 10, "maxRestarts": 1}
    start_training(space, tmp_path, (one, other), reliability=watch)
    with space.history(TORCHRUN_JOBS) as jobs, cut(local, one, other):
        first = jobs.until(lambda state: state["status"].get("attempts"))[0]
    assert (first["reason"], first["counted"]) == ("Hung", True)
    status = space.wait_phase("train", "Succeeded", 300)
    assert (status["attempt"], status["restarts"], status.get("disruptions", 0)) == (1, 1, 0)
    assert set(placed(space, "train", 1).values()) == {one, other}


@pytest.mark.parametrize("delivery", ["shared", "direct"])
def test_an_edit_reaches_every_node(
    space: Space, local: LocalCluster, tmp_path: Path, delivery: str
) -> None:
    (tmp_path / "train.py").write_text(STEP.format(number=1))
    volumes = {"workspace": {"source": "zip", "delivery": delivery}}
    settings = {"volumes": volumes, "podTemplate": apart(), "development": True}
    space.apply(job("run", "plain", "exec python3 train.py", 3, **settings))
    ended(plugin(space, tmp_path, "sync", "run"))
    space.wait_phase("run", "Running")
    assert set(placed(space, "run").values()) == {node.name for node in local.nodes}
    pods = workers(space)
    assert len(pods) == 3
    until(lambda: all("new code: 1 " in log(space, pod) for pod in pods), "the first code")
    if delivery == "shared":
        ready(space, "run-sync-1")
    (tmp_path / "train.py").write_text(STEP.format(number=2))
    ended(plugin(space, tmp_path, "sync", "run"))
    until(lambda: all("new code: 2 " in log(space, pod) for pod in pods), "the edit")
    assert workers(space) == pods
    status = space.status("run")
    assert (status["phase"], status["workspaceRevision"]) == ("Running", 2)
    assert status.get("attempt", 0) == 0
    served = next(c for c in status["conditions"] if c["type"] == "WorkspaceReady")
    assert (served["reason"] == "DirectDelivery") == (delivery == "direct")
