"""Edits of a running job: two pods with real torch that stay through each edit."""

import subprocess
import time
from pathlib import Path
from random import Random

import pytest
import yaml

from e2e.cluster import ROOT
from e2e.space import Space, until
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

SECONDS = 180
TRAIN = """
import time
print("new code:", {word}, time.time(), flush=True)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
seen = torch.tensor([{number}])
dist.all_reduce(seen)
assert seen.item() == 2 * {number}
print("all run", {number}, time.time(), flush=True)
{end}
while True: time.sleep(1)
"""


def write(directory: Path, number: int, end: str = "") -> None:
    (directory / "train.py").write_text(TRAIN.format(word=number, number=number, end=end))


def torch_queue(space: Space) -> dict:
    queue = yaml.safe_load((ROOT / "examples" / "gpt" / "queue.yaml").read_text())
    queue["spec"]["image"] = space.cluster.trainer
    return queue


def plugin(space: Space, directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["kubectl", "torchrun", *arguments, "-n", space.name],
        cwd=directory, env=space.cluster.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process: "subprocess.Popen[str]") -> str:
    out, _ = process.communicate(timeout=SECONDS)
    print(out)
    assert process.returncode == 0, out
    return out


def workers(space: Space) -> dict[str, str]:
    listed = space.api.get(
        PODS.path(space.name), params={"labelSelector": "app.kubernetes.io/component=worker"}
    ).json()["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in listed}


def log(space: Space, pod: str) -> str:
    return space.kubectl("logs", pod, "-c", "trainer", check=False)


def ready(space: Space, pod: str) -> None:
    """Wait until the pod exists and is ready."""
    until(lambda: pod in space.kubectl("get", "pods", "-o", "name"), pod)
    space.wait(f"pod/{pod}", "condition=Ready", SECONDS)


def said_at(space: Space, pod: str, start: str) -> float:
    """The time of the last line with this beginning, by the clock of the pod; 0 without one."""
    lines = [line for line in log(space, pod).splitlines() if line.startswith(start)]
    return float(lines[-1].rsplit(" ", 1)[1]) if lines else 0.0


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_edits_run_in_the_existing_pods(space: Space, tmp_path: Path) -> None:
    space.apply(torch_queue(space))
    (tmp_path / "weights.bin").write_bytes(Random(1).randbytes(4 << 20))
    write(tmp_path, 1)
    started = time.time()
    command = ["submit", "--name", "run", "--queue", "cpu", "--nodes", "2", "--no-follow"]
    ended(plugin(space, tmp_path, *command, "python train.py"))
    space.wait_phase("run", "Running", SECONDS)
    pods = workers(space)
    rank0 = sorted(pods)[0]
    until(lambda: "all run 1" in log(space, rank0), "the first code")
    print(f"submit to first line: {said_at(space, rank0, 'new code:') - started:.1f} s")

    space.kubectl("patch", "trj", "run", "--type=merge", "-p", '{"spec":{"development":true}}')
    ready(space, "run-sync-1")
    for number, name in ((2, "run-sync-2"), (3, "run-sync-3")):
        write(tmp_path, number)
        entered = time.time()
        out = ended(plugin(space, tmp_path, "sync", "run"))
        assert f"Revision {number}: 1 file," in out
        until(lambda n=number: f"all run {n}" in log(space, rank0), f"code {number}")
        line = said_at(space, rank0, f"new code: {number}") - entered
        together = said_at(space, rank0, f"all run {number}") - entered
        print(f"reload {number}: first line {line:.2f} s, all ranks met {together:.2f} s")
        ready(space, name)
    assert workers(space) == pods

    (tmp_path / "train.py").write_text("def broken(:\n")
    ended(plugin(space, tmp_path, "sync", "run"))
    # Its ranks may be stopped before they fail, because those of the other node fail first.
    waits = "development mode: the pod waits for"
    until(lambda: waits in log(space, rank0), "the broken edit")
    ready(space, "run-sync-4")
    write(tmp_path, 5, "raise SystemExit(0)")
    ended(plugin(space, tmp_path, "sync", "run"))
    space.wait_phase("run", "Succeeded", SECONDS)
    status = space.get(TORCHRUN_JOBS, "run")["status"]
    assert (status["workspaceRevision"], status.get("restarts", 0)) == (5, 0)
    assert workers(space) == pods


STEP = "import time; print('new code:', {number}, time.time(), flush=True); time.sleep(1000)"


def test_an_edit_runs_within_seconds(
    space: Space, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Without torch, whose import would dominate the time."""
    (tmp_path / "train.py").write_text(STEP.format(number=1))
    command = ["submit", "--name", "run", "--queue", "plain", "--nodes", "2", "--no-follow"]
    started = time.time()
    ended(plugin(space, tmp_path, *command, "exec python3 train.py"))
    space.wait_phase("run", "Running", SECONDS)
    pods = workers(space)
    until(lambda: all("new code: 1" in log(space, pod) for pod in pods), "the first code")
    full = max(said_at(space, pod, "new code:") for pod in pods) - started
    space.kubectl("patch", "trj", "run", "--type=merge", "-p", '{"spec":{"development":true}}')
    seconds = []
    for number in (2, 3, 4):
        ready(space, f"run-sync-{number - 1}")
        (tmp_path / "train.py").write_text(STEP.format(number=number))
        entered = time.time()
        ended(plugin(space, tmp_path, "sync", "run"))
        until(lambda n=number: all(f"new code: {n}" in log(space, pod) for pod in pods), "new code")
        seconds.append(max(said_at(space, pod, "new code:") for pod in pods) - entered)
        space.wait_phase("run", "Running", SECONDS)
    print(f"submit {full:.2f} s; reloads", ", ".join(f"{s:.2f} s" for s in seconds))
    assert workers(space) == pods
    if pytestconfig.getoption("--long"):  # only these run alone on the machine
        assert min(seconds) < full
