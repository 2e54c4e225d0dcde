"""A node loses power: all its processes end at one moment, and its disk stays."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bodies import Body
from e2e.manifests import job, queue
from e2e.nodes import HOSTNAME, apart, placed
from e2e.space import Space, until
from e2e.test_nodes import RESOURCES, submit
from torchrun_api import names
from torchrun_api.kinds.resources import PODS
from torchrun_cluster import LocalCluster
from torchrun_cluster.node import CONTAINERD_SOCKET

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.usefixtures("controller_on_the_first_node"),
]
# Every rank records each step, on storage shared by all gangs, by the clock of the machine.
TRAINS = """\
import os, time, torch, torch.distributed as dist
attempt, rank = os.environ["TORCHRUN_ATTEMPT"], os.environ["RANK"]
dist.init_process_group("gloo")
steps = open(f"/checkpoints/{attempt}-{rank}", "a", buffering=1)
done = torch.zeros(1)
while not done:
    print(time.monotonic(), file=steps)
    done += os.path.exists("/checkpoints/done")
    dist.all_reduce(done)
    time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.fixture
def training(space: Space, local: LocalCluster, tmp_path: Path) -> Space:
    """The job `train` trains on both nodes that are not the first one."""
    volume = {"enabled": True, "size": "32Mi"}
    storage = {"workspace": volume, "checkpoints": volume}
    settings = {"nodeResources": RESOURCES, "storage": storage, "podTemplate": apart()}
    space.apply(queue("torch", space.cluster.trainer, **settings))
    first = local.nodes[0].name
    space.kubectl("cordon", first)
    try:
        options = ("--queue", "torch", "--nodes", "2", "--name", "train")
        submit(space, tmp_path, TRAINS, "python3 run.py", *options)
        space.wait_phase("train", "Running")
        wait_training(space, 0)
    finally:
        space.kubectl("uncordon", first)
    return space


@contextmanager
def powered_off(local: LocalCluster, name: str) -> Iterator[None]:
    """Cut the node's power until the end of the block."""
    local.power_off(name)
    try:
        yield
    finally:
        local.power_on(name)


def workers(space: Space, attempt: int) -> dict[int, Body]:
    """The pods of an attempt, by index."""
    selector = f"{names.JOB_LABEL}=train,{names.ATTEMPT_LABEL}={attempt}"
    listed = space.api.get(PODS.path(space.name), params={"labelSelector": selector}).json()
    pods = [p for p in listed["items"] if names.COMPLETION_INDEX_LABEL in p["metadata"]["labels"]]
    return {int(pod["metadata"]["labels"][names.COMPLETION_INDEX_LABEL]): pod for pod in pods}


def inside(space: Space, pod: Body, script: str) -> str:
    """Run a shell script in the pod."""
    command = ("exec", pod["metadata"]["name"], "-c", names.TRAINER_CONTAINER, "--")
    return space.cluster.kubectl("-n", space.name, *command, "sh", "-c", script).stdout


def steps(space: Space, pod: Body) -> dict[str, list[float]]:
    """The times of the steps of all ranks so far, by attempt and rank."""
    lines = inside(
        space, pod, "cd /checkpoints; grep --no-messages . *-* /dev/null || true"
    ).splitlines()
    times: dict[str, list[float]] = {}
    for line in lines:
        name, _, step = line.partition(":")
        times.setdefault(name, []).append(float(step))
    return times


def wait_training(space: Space, attempt: int) -> None:
    """Wait for ten steps of both ranks of an attempt, whose pods exist."""

    def trains() -> bool:
        counts = [len(steps(space, pods[0]).get(f"{attempt}-{rank}", ())) for rank in range(2)]
        return min(counts) >= 10

    pods = workers(space, attempt)
    for pod in pods.values():
        space.wait(f"pod/{pod['metadata']['name']}", "condition=Ready")
    until(trains, f"steps of attempt {attempt}")


def containers(local: LocalCluster, node: str) -> str:
    """The containers with processes on a node."""
    ctr = ("ctr", "--namespace", "k8s.io", "--address", CONTAINERD_SOCKET, "tasks", "list")
    command = [*local.inside(node), *ctr]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assert_node_is_back(space: Space, local: LocalCluster, lost: str, pod: Body) -> None:
    """Check that no container of the old pod runs, and that the node runs a pod of another job."""
    container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    space.wait(f"node/{lost}", "condition=Ready")
    assert container not in containers(local, lost)
    reboots = space.kubectl("events", "-n", "default", "--for", f"node/{lost}")
    assert "Rebooted" in reboots
    there = {"spec": {"nodeSelector": {HOSTNAME: lost}}}
    space.apply(job("next", "plain", ["python3", "-c", "print('ends')"], podTemplate=there))
    space.wait_phase("next", "Succeeded")


def assert_gangs_follow_each_other(space: Space, lost_rank: str, off: float) -> None:
    """Check that the lost rank took no step without power, and no old rank one beside a new one."""
    (pod, _) = workers(space, 1).values()
    times = steps(space, pod)
    assert times[lost_rank][-1] < off
    last = max(times[f"0-{rank}"][-1] for rank in range(2))
    first = min(times[f"1-{rank}"][0] for rank in range(2))
    print(f"no rank trained for {first - last:.1f} s")
    assert first > last
    assert set(times) == {"0-0", "0-1", "1-0", "1-1"}


def finish(space: Space) -> Body:
    """End the training. Returns the status of the job."""
    (pod, _) = workers(space, 1).values()
    inside(space, pod, "touch /checkpoints/done")
    return space.wait_phase("train", "Succeeded")


@pytest.mark.nodes(3)
@pytest.mark.parametrize("index", [0, 1])
def test_the_gang_of_a_node_without_power_trains_on_others(
    training: Space, local: LocalCluster, index: int
) -> None:
    space = training
    lost, pod = placed(space, "train")[index], workers(space, 0)[index]
    with powered_off(local, lost):
        off = time.monotonic()
        until(lambda: len(workers(space, 1)) == 2, "the next gang")
        wait_training(space, 1)
        assert lost not in placed(space, "train", 1).values()
        # No kubelet has confirmed the end of the old pod.
        assert workers(space, 0)[index]["metadata"]["uid"] == pod["metadata"]["uid"]
    space.wait(f"pod/{pod['metadata']['name']}", "delete")
    assert_gangs_follow_each_other(space, f"0-{index}", off)
    status = finish(space)
    assert_node_is_back(space, local, lost, pod)
    assert [one["reason"] for one in status["attempts"]] == ["NodeLost"]
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)


@pytest.mark.nodes(3)
@pytest.mark.parametrize("index", [0, 1])
def test_a_node_that_restarts_before_it_is_lost_costs_no_restart(
    training: Space, local: LocalCluster, index: int
) -> None:
    space = training
    lost, pod = placed(space, "train")[index], workers(space, 0)[index]
    with powered_off(local, lost):
        off = time.monotonic()
    until(lambda: len(workers(space, 1)) == 2, "the next gang")
    wait_training(space, 1)
    # It stays, as every pod that has failed, and is not started again.
    assert workers(space, 0)[index]["status"]["phase"] == "Failed"
    assert_gangs_follow_each_other(space, f"0-{index}", off)
    status = finish(space)
    assert_node_is_back(space, local, lost, pod)
    assert [one["reason"] for one in status["attempts"]] == ["ContainerStatusUnknown"]
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)
