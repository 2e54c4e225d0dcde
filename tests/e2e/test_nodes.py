"""Fenced gangs in real pods: a newer epoch, and a node whose kubelet is stopped for a time."""

import json
from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds import JOBS, PODS, TORCHRUN_JOBS

STATE = "/torchrun-state"
LASTS = """\
import os, time
print("attempt", os.environ["TORCHRUN_ATTEMPT"], flush=True)
time.sleep(600 if os.environ["TORCHRUN_ATTEMPT"] == "0" else 1)
"""
# Every rank records when it trains, on storage shared by all gangs, by the clock of the machine.
BEATS = """\
import os, time, torch, torch.distributed as d
attempt, rank = os.environ["TORCHRUN_ATTEMPT"], os.environ["RANK"]
d.init_process_group("gloo")
beats = open(f"/checkpoints/{attempt}-{rank}", "a", buffering=1)
steps = 10**9 if attempt == "0" else 20
for _ in range(steps):
    d.all_reduce(torch.ones(1))
    print(time.monotonic(), file=beats)
    time.sleep(0.1)
if rank == "0":
    for name in sorted(os.listdir("/checkpoints")):
        times = [float(line) for line in open(f"/checkpoints/{name}") if line.endswith("\\n")]
        print("trained", name, times[0], times[-1], flush=True)
"""


def submit(space: Space, directory: Path, script: str, command: str, *options: str) -> None:
    """Submit `script` as run.py in its own directory, detached."""
    (directory / "run.py").write_text(script)
    words = ("torchrun", "submit", "--no-follow", "-n", space.name, "-C", str(directory), *options)
    space.cluster.kubectl(*words, command)


@pytest.mark.long
def test_a_newer_epoch_ends_a_gang(space: Space, tmp_path: Path):
    with space.history(PODS) as pods:
        # A shell line, which runs without torchrun.
        command = "cd . && python3 run.py"
        submit(space, tmp_path, LASTS, command, "--queue", "plain", "--name", "fenced")
        space.wait_phase("fenced", "Running")
        pod = pods.until(worker)
        inside = ("exec", pod, "-c", names.TRAINER_CONTAINER, "--")
        epoch = json.loads(space.kubectl(*inside, "cat", f"{STATE}/epoch"))
        uid = space.get(TORCHRUN_JOBS, "fenced")["metadata"]["uid"]
        assert epoch == {"attempt": 0, "job": uid}
        assert f"{uid}.0.0" in space.kubectl(*inside, "ls", f"{STATE}/watchers")
        newer = json.dumps({**epoch, "attempt": 1})
        space.kubectl(*inside, "sh", "-c", f"echo '{newer}' > {STATE}/epoch")
        status = space.wait_phase("fenced", "Succeeded")
    assert status["attempts"][0]["reason"] == "Fenced"
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_an_absent_kubelet_never_leads_to_two_training_gangs(space: Space, tmp_path: Path):
    local = space.cluster.local
    if local is None:
        pytest.skip("the kubelet of this cluster is not ours to stop")
    storage = {
        "workspace": {"enabled": True, "size": "32Mi"},
        "checkpoints": {"enabled": True, "size": "32Mi"},
    }
    resources = {"cpus": "250m", "memory": "1500Mi"}
    space.apply(queue("torch", space.cluster.trainer, nodeResources=resources, storage=storage))
    options = ("--queue", "torch", "--nodes", "2", "--name", "unheard")
    submit(space, tmp_path, BEATS, "python3 run.py", *options)
    space.wait_phase("unheard", "Running")
    with space.history(JOBS) as jobs:
        local.stop("kubelet")
        try:
            jobs.until(lambda _: True, 150, name="unheard-r1")
            status = space.get(TORCHRUN_JOBS, "unheard")["status"]
        finally:
            local.start("kubelet")
    assert status["attempts"][0]["reason"] == "NodeLost"
    assert [worker.get("index", 0) for worker in status["unfenced"]] == [0, 1]
    status = space.wait_phase("unheard", "Succeeded", 240)
    assert (status["attempt"], status.get("restarts", 0), status["disruptions"]) == (1, 0, 1)
    trained = beats(space.cluster.kubectl("torchrun", "logs", "unheard", "-n", space.name).stdout)
    assert set(trained) == {"0-0", "0-1", "1-0", "1-1"}
    last = max(trained["0-0"][1], trained["0-1"][1])
    first = min(trained["1-0"][0], trained["1-1"][0])
    print(f"the new gang began {first - last:.1f} s after the old one's last step")
    assert first > last


def beats(log: str) -> dict[str, tuple[float, float]]:
    """The first and the last step of each rank, by attempt and rank."""
    found = (line.split("trained ")[1].split() for line in log.splitlines() if "trained " in line)
    return {name: (float(first), float(last)) for name, first, last in found}


def worker(pod: JsonObject) -> str | None:
    """The name of a running worker."""
    runs = pod["status"].get("phase") == "Running"
    mine = pod["metadata"]["labels"][names.COMPONENT_LABEL] == names.WORKER
    return str(pod["metadata"]["name"]) if runs and mine else None
