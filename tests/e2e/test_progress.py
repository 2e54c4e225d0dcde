"""Progress in the status, and the detection and restart of a hanging gang."""

from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space
from torchrun_api.kinds.resources import TORCHRUN_JOBS

RESOURCES = {"cpus": "250m", "memory": "1500Mi"}
OPTIONS = ("--queue", "torch", "--nodes", "2", "--name", "run")

TRAINS = """
import os, time
import torch, torch.distributed as dist, torchrun_progress
dist.init_process_group("gloo")
for step in range(1, 41):
    loss = torch.tensor(1.0 / step)
    dist.all_reduce(loss)
    torchrun_progress.report(step=step, total=40, loss=loss, samples_per_second=32)
    time.sleep(0.5)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_progress_of_a_running_job_is_in_the_status(space: Space, tmp_path: Path):
    space.apply(queue("torch", space.cluster.trainer, nodeResources=RESOURCES))
    (tmp_path / "train.py").write_text(TRAINS)
    with space.histories(TORCHRUN_JOBS) as (jobs,):
        run = space.submit(tmp_path, "python train.py", *OPTIONS)
    assert run.returncode == 0
    progress = space.get(TORCHRUN_JOBS, "run")["status"]["progress"]
    assert (progress["step"], progress["totalSteps"]) == (40, 40)
    assert progress["samplesPerSecond"] == 32
    assert abs(progress["loss"] - 2 / 40) < 1e-6
    reports = [state.get("status", {}).get("progress", {}) for state in jobs.states("run")]
    seen = [progress.get("step", 0) for progress in reports]
    assert any(0 < step < 40 for step in seen), seen
    assert "does not accept the progress" not in run.stdout + run.stderr


HANGS = """
import os, time
import torch, torch.distributed as dist, torchrun_progress
dist.init_process_group("gloo")
rank, number = dist.get_rank(), os.environ["TORCHRUN_ROUND"]
def waits_for_ever():
    time.sleep(10_000)
def trains():
    for step in range(1, 11):
        if number == "0" and rank == 1 and step == 4:
            waits_for_ever()
        dist.all_reduce(torch.ones(1))
        torchrun_progress.report(step=step, total=10)
        time.sleep(0.2)
trains()
if number == "1":
    copy = open(f"{os.environ['TORCHRUN_STATE_DIR']}/logs/0/node-{rank}.log").read()
    print(f"copied by rank {rank}:", "stack of" in copy, "waits_for_ever" in copy, flush=True)
dist.barrier()
"""


def test_a_blocked_rank_restarts_the_ranks_once(space: Space, tmp_path: Path):
    reliability = {"hangTimeoutSeconds": 10, "maxRestarts": 1}
    torch = queue("torch", space.cluster.trainer, nodeResources=RESOURCES, reliability=reliability)
    space.apply(torch)
    (tmp_path / "train.py").write_text(HANGS)
    run = space.submit(tmp_path, "python train.py", *OPTIONS)
    assert run.returncode == 0
    status = space.get(TORCHRUN_JOBS, "run")["status"]
    assert (status["progress"]["step"], status["progress"]["totalSteps"]) == (10, 10)
    (first,) = status["attempts"]
    assert (first["reason"], first["counted"]) == ("Hung", True)
    assert (status.get("attempt", 0), first["round"], status["restarts"]) == (0, 0, 1)
    assert status["lastFailure"]["exitCode"] == 124
    assert "hangTimeoutSeconds 10" in status["lastFailure"]["message"]
    # Logs of both nodes, as either can report the hang: rank 1 blocks, and rank 0 waits for it.
    assert "of rank 0:" in run.stdout
    assert "of rank 1:" in run.stdout
    assert "in waits_for_ever" in run.stdout
    assert "in all_reduce" in run.stdout
    assert "copied by rank 0: True False" in run.stdout
    assert "copied by rank 1: True True" in run.stdout
