"""A failed job names the first failed rank and its error."""

from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

RAISES = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("loss is nan after step 7")
time.sleep(300)
"""
EXITS = RAISES.replace('raise ValueError("loss is nan after step 7")', "os._exit(9)")


@pytest.mark.parametrize(
    ("script", "exit_code", "message"),
    [
        (RAISES, 1, "ValueError: loss is nan after step 7"),
        pytest.param(EXITS, 9, "9", marks=pytest.mark.long),
    ],
    ids=["exception", "exit"],
)
def test_the_first_failed_rank_is_named(
    space: Space, tmp_path: Path, script: str, exit_code: int, message: str
):
    resources = {"cpus": "250m", "memory": "512Mi"}
    once = {"maxRestarts": 0}
    space.apply(queue("torch", space.cluster.trainer, nodeResources=resources, reliability=once))
    (tmp_path / "train.py").write_text(script)
    run = space.submit(
        tmp_path, "python train.py", "--queue", "torch", "--nodes", "2", "--name", "dies"
    )
    assert run.returncode == 1
    status = space.get(TORCHRUN_JOBS, "dies")["status"]
    assert status["phase"] == "Failed"
    failure = status["lastFailure"]
    assert failure["rank"] == 1
    assert failure["exitCode"] == exit_code
    assert message in failure["message"]
    assert message in run.stderr
    assert "rank 1" in run.stderr
    assert worker_exit_code(space, 1) == exit_code


def worker_exit_code(space: Space, index: int) -> int:
    """The exit code of the container of one node."""
    selector = f"batch.kubernetes.io/job-completion-index={index}"
    listed = space.api.get(PODS.path(space.name), params={"labelSelector": selector}).json()
    (pod,) = listed["items"]
    (status,) = pod["status"]["containerStatuses"]
    return status["state"]["terminated"]["exitCode"]
