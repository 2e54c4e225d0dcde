"""setupCommand and requirements with real pods, without network access outside the cluster."""

from pathlib import Path

import pytest
import yaml

from e2e.manifests import job, queue
from e2e.space import Space
from e2e.test_plugin import plugin, project
from torchrun_api import names
from torchrun_api.kinds.resources import PODS
from wheels import WHEEL, add_wheel

SIZE = {"cpus": "200m", "memory": "1Gi"}
ZIP = {"workspace": {"source": "zip"}}
# Fails once, so that a second gang follows. Every rank must see the environment of the setup.
TRAIN = """
import os, sys
import greeting, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
greeting.main()
made = open(os.environ["TORCHRUN_ENV_DIR"] + "/made").read().strip()
print("sum", total.item(), "made", made, "prefix", sys.prefix, flush=True)
dist.destroy_process_group()
sys.exit(3 if os.environ["TORCHRUN_ATTEMPT"] == "0" else 0)
"""
SETUP = 'python -c "import greeting" && date +%s%N > "$TORCHRUN_ENV_DIR/made" && touch dropped'


def directory(tmp_path: Path, **files: str) -> Path:
    add_wheel(tmp_path)
    return project(tmp_path, requirements_txt=f"./{WHEEL}\n", **files)


def upload(space: Space, tmp_path: Path, name: str) -> None:
    code, _, err = plugin(space, tmp_path, "sync", name)
    assert code == 0, err


def logs(space: Space, name: str) -> str:
    workers = f"{names.JOB_LABEL}={name},{names.COMPONENT_LABEL}={names.WORKER}"
    return space.kubectl("logs", "-l", workers, "-c", "trainer", "--tail=-1")


@pytest.mark.long
def test_every_rank_of_every_attempt_uses_the_same_environment(
    space: Space, tmp_path: Path
) -> None:
    gang = {"restartScope": "Gang"}
    space.apply(queue("torch", space.cluster.trainer, nodeResources=SIZE, reliability=gang))
    directory(tmp_path, train_py=TRAIN)
    wanted = {"setupCommand": SETUP, "requirements": ["--no-index", "-r requirements.txt"]}
    with space.history(PODS) as pods:
        space.apply(
            job("train", "torch", "python train.py", 2, launcher="auto", volumes=ZIP, **wanted)
        )
        upload(space, tmp_path, "train")
        space.wait_reason("train", "SetupRunning")
        status = space.wait_phase("train", "Succeeded")
        setups = [pod for pod in pods.uids() if "-setup-" in pod]
    assert setups == ["train-setup-0"]
    assert (status["attempt"], status["restarts"]) == (1, 1)
    sums = [line for line in logs(space, "train").splitlines() if line.startswith("sum ")]
    assert len(sums) >= 2, "lines of the first attempt may be gone"
    assert len(set(sums)) == 1, "one environment for all"
    assert sums[0].startswith("sum 2.0 made ")
    assert sums[0].endswith("prefix /torchrun/env")


@pytest.mark.long
def test_a_failed_setup_shows_its_message_and_waits_for_a_fix(space: Space, tmp_path: Path) -> None:
    directory(tmp_path, train_py="import greeting; greeting.main()")
    wanted = {"setupCommand": "echo 'no compiler here' >&2; exit 4", "volumes": ZIP}
    with space.history(PODS) as pods:
        space.apply(job("train", "plain", "python train.py", 1, **wanted))
        upload(space, tmp_path, "train")
        status = space.wait_reason("train", "SetupFailed")
        assert status["phase"] == "Syncing"
        assert "setupCommand ended with exit code 4: no compiler here" in status["message"]
        fixed = yaml.safe_dump({"spec": {"setupCommand": f"pip install --no-index {WHEEL}"}})
        space.kubectl("patch", "tj", "train", "--type=merge", "-p", fixed)
        space.wait_phase("train", "Succeeded")
        assert sorted(pod for pod in pods.uids() if "-setup-" in pod) == [
            "train-setup-0",
            "train-setup-1",
        ]
    assert "hello" in logs(space, "train")


def test_without_a_workspace_every_worker_runs_the_setup(space: Space) -> None:
    line = 'echo "for node $NODE_RANK" > "$TORCHRUN_ENV_DIR/said"'
    command = 'cat "$TORCHRUN_ENV_DIR/said"; python -c "import sys; print(sys.prefix)"'
    space.apply(job("alone", "plain", command, 2, setupCommand=line))
    status = space.wait_phase("alone", "Succeeded")
    ready = next(c for c in status["conditions"] if c["type"] == "WorkspaceReady")
    assert "Each pod runs the setup" in ready["message"]
    log = logs(space, "alone")
    assert {f"for node {index}" for index in (0, 1)} <= set(log.splitlines())
    assert log.count("/torchrun/env") >= 2
