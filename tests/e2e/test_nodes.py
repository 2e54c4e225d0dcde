"""Fenced gangs on real nodes: a newer epoch, silent nodes that come back, and a drained one."""

import json
from pathlib import Path

import pytest

from e2e.manifests import job, queue
from e2e.nodes import apart, one_to_lose, placed, silent
from e2e.space import Space, until
from e2e.test_reload import log, workers
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS
from torchrun_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("controller_on_the_first_node")]
RESOURCES = {"cpus": "250m", "memory": "1500Mi"}
STATE = "/torchrun-state"
LASTS = """\
import os, time
print("attempt", os.environ["TORCHRUN_ATTEMPT"], flush=True)
time.sleep(600 if os.environ["TORCHRUN_ATTEMPT"] == "0" else 1)
"""
# Every rank records when it trains, on storage shared by all gangs, by the clock of the machine.
# The first gang trains without messages between its ranks, so one of them can go on alone.
BEATS = """\
import os, time, torch, torch.distributed as d
attempt, rank = os.environ["TORCHRUN_ATTEMPT"], os.environ["RANK"]
d.init_process_group("gloo")
print("starts to train", flush=True)
beats = open(f"/checkpoints/{attempt}-{rank}", "a", buffering=1)
steps = 10**9 if attempt == "0" else 20
for _ in range(steps):
    if attempt != "0":
        d.all_reduce(torch.ones(1))
    print(time.monotonic(), file=beats)
    time.sleep(0.1)
if rank == "0":
    for name in sorted(os.listdir("/checkpoints")):
        times = [float(line) for line in open(f"/checkpoints/{name}") if line.endswith("\\n")]
        print("trained", name, times[0], times[-1], flush=True)
d.destroy_process_group()
"""


def submit(space: Space, directory: Path, script: str, command: str, *options: str) -> None:
    """Submit `script` as run.py in its own directory, detached."""
    (directory / "run.py").write_text(script)
    words = ("torchrun", "submit", "--no-follow", "-n", space.name, "-C", str(directory), *options)
    space.cluster.kubectl(*words, command)


@pytest.mark.nodes(2)
def test_a_newer_epoch_ends_a_gang(space: Space, local: LocalCluster, tmp_path: Path):
    space.apply(queue("apart", space.cluster.controller, podTemplate=apart()))
    with space.history(PODS) as pods:
        # A shell line, which runs without torchrun.
        command = "cd . && python3 run.py"
        options = ("--queue", "apart", "--nodes", "2", "--name", "fenced")
        submit(space, tmp_path, LASTS, command, *options)
        space.wait_phase("fenced", "Running")
        pod = pods.until(worker)
        inside = ("exec", pod, "-c", names.TRAINER_CONTAINER, "--")
        epoch = json.loads(space.kubectl(*inside, "cat", f"{STATE}/epoch"))
        uid = space.get(TORCHRUN_JOBS, "fenced")["metadata"]["uid"]
        assert epoch == {"attempt": 0, "job": uid}
        watchers = space.kubectl(*inside, "ls", f"{STATE}/watchers")
        assert all(f"{uid}.0.{index}" in watchers for index in range(2))
        newer = json.dumps({**epoch, "attempt": 1})
        space.kubectl(*inside, "sh", "-c", f"echo '{newer}' > {STATE}/epoch")
        status = space.wait_phase("fenced", "Succeeded")
    assert status["attempts"][0]["reason"] == "Fenced"
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)


@pytest.mark.nodes(3)
@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize("cause", ["kubelet", "network"])
def test_a_silent_node_never_leads_to_two_training_gangs(
    space: Space, local: LocalCluster, tmp_path: Path, cause: str
):
    storage = {
        "workspace": {"enabled": True, "size": "32Mi"},
        "checkpoints": {"enabled": True, "size": "32Mi"},
    }
    settings = {"nodeResources": RESOURCES, "storage": storage, "podTemplate": apart()}
    space.apply(queue("torch", space.cluster.trainer, **settings))
    options = ("--queue", "torch", "--nodes", "2", "--name", "unheard")
    submit(space, tmp_path, BEATS, "python3 run.py", *options)
    space.wait_phase("unheard", "Running")
    # From here on the ranks need no DNS, which a cut network takes from them.
    first_gang = workers(space)
    until(lambda: all("starts to train" in log(space, pod) for pod in first_gang), "training")
    index, lost = one_to_lose(local, placed(space, "unheard"))
    with space.histories(TORCHRUN_JOBS, PODS) as (jobs, pods):
        pod = pods.until(lambda state: state["spec"].get("nodeName") == lost and worker(state))
        with silent(local, lost, cause):
            unfenced = jobs.until(lambda state: state["status"].get("unfenced"), 300)
            # The node is still silent: two others are enough.
            status = space.wait_phase("unheard", "Succeeded", 400)
            assert lost not in placed(space, "unheard", 1).values()
        space.wait(f"pod/{pod}", "delete")
    assert [(one.get("index", 0), one["node"]) for one in unfenced] == [(index, lost)]
    assert status["attempts"][0]["reason"] == "NodeLost"
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)
    trained = beats(space.cluster.kubectl("torchrun", "logs", "unheard", "-n", space.name).stdout)
    assert set(trained) == {"0-0", "0-1", "1-0", "1-1"}
    alone, other = trained[f"0-{index}"][1], trained[f"0-{1 - index}"][1]
    assert alone > other, "the silent rank goes on"
    first = min(trained["1-0"][0], trained["1-1"][0])
    print(f"{cause}: alone for {alone - other:.1f} s, then no rank for {first - alone:.1f} s")
    assert first > max(alone, other)


@pytest.mark.nodes(3)
def test_a_drained_node_costs_no_restart(space: Space, local: LocalCluster):
    space.apply(job("drains", "plain", ["python3", "-c", LASTS], 2, podTemplate=apart()))
    space.wait_phase("drains", "Running")
    _, drained = one_to_lose(local, placed(space, "drains"))
    try:
        space.kubectl("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data")
        status = space.wait_phase("drains", "Succeeded")
    finally:
        space.kubectl("uncordon", drained)
    assert drained not in placed(space, "drains", 1).values()
    assert status["attempts"][0]["reason"] == "EvictionByEvictionAPI"
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)


def beats(log: str) -> dict[str, tuple[float, float]]:
    """The first and the last step of each rank, by attempt and rank."""
    found = (line.split("trained ")[1].split() for line in log.splitlines() if "trained " in line)
    return {name: (float(first), float(last)) for name, first, last in found}


def worker(pod: JsonObject) -> str | None:
    """The name of a running worker."""
    runs = pod["status"].get("phase") == "Running"
    mine = pod["metadata"]["labels"][names.COMPONENT_LABEL] == names.WORKER
    return str(pod["metadata"]["name"]) if runs and mine else None
