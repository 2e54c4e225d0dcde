"""An elastic job changes its size on request and without nodes, without losing steps."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.manifests import job, queue
from e2e.space import Space
from e2e.test_life import assert_gangs_never_overlap
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

GPT = Path(__file__).parents[2] / "examples" / "gpt"
CODE = ("train.py", "model.py", "sonnets.txt")
TRAINING = {"cpus": "250m", "memory": "1Gi"}
STEPS = 100_000  # more than the test waits for
# exec: ranks are Python processes, not shells, so SIGTERM reaches them.
TRAIN = (
    f"exec python3 -u /code/train.py --steps {STEPS} --batch 6 --log-every 1"
    " --checkpoint-every 50 >> /checkpoints/log-$RANK 2>&1"
)
HANGS = ["python3", "-c", "import time; time.sleep(3000)"]
SLOT = "example.com/slot"


def wait_size(space: Space, name: str, size: int, seconds: float) -> JsonObject:
    ready = f"jsonpath={{.status.workersStatus}}={size}/{size} ready"
    space.wait(f"torchrunjob/{name}", ready, seconds)
    return space.get(TORCHRUN_JOBS, name)["status"]


def log_of_rank_0(space: Space, name: str) -> str:
    selector = f"{names.JOB_LABEL}={name},{names.COMPLETION_INDEX_LABEL}=0"
    listed = space.kubectl(
        *("get", "pods", "-l", selector, "--field-selector=status.phase=Running", "-o", "name")
    ).split()
    read = ("exec", listed[-1], "-c", "trainer", "--", "cat", "/checkpoints/log-0")
    return space.kubectl(*read, check=False)


def wait_steps(space: Space, name: str, resumed: int, seconds: float = 120) -> None:
    """Wait until the gang has done some steps after the `resumed`-th restart."""
    deadline = time.monotonic() + seconds
    while True:
        log = log_of_rank_0(space, name)
        parts = log.split("resumed after step")
        if len(parts) == resumed + 1 and len(steps_of(parts[-1])) > 5:
            return
        assert time.monotonic() < deadline, f"resumed {len(parts) - 1} times: {log[-2000:]}"
        time.sleep(1)


def steps_of(log: str) -> list[int]:
    return [int(step) for step in re.findall(rf"step (\d+)/{STEPS} loss", log)]


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_the_steps_have_no_gap_from_2_to_3_to_2_nodes(space: Space):
    storage = {"checkpoints": {"enabled": True, "size": "64Mi"}}
    volumes = {
        "additionalVolumes": [{"name": "code", "configMap": {"name": "gpt"}}],
        "additionalMounts": [{"name": "code", "mountPath": "/code"}],
    }
    code = {name: (GPT / name).read_text(encoding="utf-8") for name in CODE}
    space.kubectl(
        *("create", "-f", "-"),
        stdin=json.dumps(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpt"}, "data": code}
        ),
    )
    space.apply(
        queue("torch", space.cluster.trainer, nodeResources=TRAINING, storage=storage),
        job(
            *("gpt", "torch", TRAIN, 2),
            launcher="torchrun",
            elastic={"minNodes": 1, "maxNodes": 3},
            volumes=volumes,
        ),
    )
    with space.history(PODS) as pods:
        for resumed, size in enumerate((2, 3, 2)):
            space.kubectl("scale", "torchrunjob/gpt", f"--replicas={size}")
            status = wait_size(space, "gpt", size, 150)
            wait_steps(space, "gpt", resumed)
        assert_gangs_never_overlap(pods)
        log = log_of_rank_0(space, "gpt")
    assert (status["attempt"], status.get("restarts", 0), status.get("disruptions", 0)) == (2, 0, 0)
    steps = steps_of(log)
    assert steps == list(range(1, len(steps) + 1)), "each step once, in order"
    space.kubectl("delete", "torchrunjob", "gpt")


@pytest.fixture
def slots(space: Space) -> Iterator[None]:
    """An extended resource of the node, which the test changes to simulate nodes that come and go."""
    yield
    offer(space, 0)


def offer(space: Space, count: int) -> None:
    node = space.kubectl("get", "nodes", "-o", "name").split()[0]
    given = {SLOT: str(count)}
    body = json.dumps({"status": {"capacity": given, "allocatable": given}})
    space.kubectl("patch", node, "--subresource=status", "--type=merge", "-p", body)


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_a_gang_shrinks_and_has_all_nodes_after_a_pause(space: Space, slots: None):
    offer(space, 3)
    space.apply(
        queue(
            *("slots", space.cluster.controller),
            nodeResources={"cpus": "50m", "memory": "64Mi", "extra": {SLOT: 1}},
        ),
        job("train", "slots", HANGS, 3, elastic={"minNodes": 1, "maxNodes": 3}),
    )
    with space.history(PODS) as pods:
        wait_size(space, "train", 3, 300)
        offer(space, 2)
        space.kubectl("delete", "pod", "-l", f"{names.COMPLETION_INDEX_LABEL}=1", "--wait=false")
        space.wait("torchrunjob/train", "condition=FullSize=false")
        space.wait_reason("train", "Unschedulable")
        nodes = len(space.kubectl("get", "nodes", "-o", "name").split())
        lack = f"{nodes} lacks" if nodes == 1 else f"{nodes} lack"
        verdict = f"0 of {nodes} nodes are available: {lack} {SLOT}"
        space.wait_message("train", verdict, "The gang shrinks to 2 nodes unless")
        status = wait_size(space, "train", 2, 300)
        space.wait_reason("train", "Shrunk")
        assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (2, 0, 1)
        offer(space, 3)
        for suspend, phase in ((True, "Suspended"), (False, "Running")):
            patch = json.dumps({"spec": {"suspend": suspend}})
            space.kubectl("patch", "torchrunjob/train", "--type=merge", "-p", patch)
            space.wait("torchrunjob/train", f"jsonpath={{.status.phase}}={phase}", 300)
        status = wait_size(space, "train", 3, 300)
        assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (3, 0, 1)
        assert [a["reason"] for a in status["attempts"]] == ["PodDeleted", "Shrinking", "Suspended"]
        assert_gangs_never_overlap(pods)
