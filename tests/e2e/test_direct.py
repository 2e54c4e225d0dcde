"""Delivery without shared storage: real ranks run code from a serve pod."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.manifests import job, queue
from e2e.space import Space, until
from e2e.test_plugin import plugin, project
from e2e.test_reload import STEP, ended, log, said_at, workers
from e2e.test_reload import plugin as reloading
from torchrun_api import names
from torchrun_api.kinds.resources import CLAIMS, PODS, TORCHRUN_JOBS

CLASS = "never-binds"
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
import package.module
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), package.module.SAID, flush=True)
dist.destroy_process_group()
sys.exit(3 if os.environ["TORCHRUN_ATTEMPT"] == "0" else 0)
"""
# Attempt 0 runs until it is stopped. Later attempts succeed at once.
HANGS_ONCE = """
import os, time
time.sleep(0 if int(os.environ["TORCHRUN_ATTEMPT"]) else 600)
print("ran the code that was served", flush=True)
"""


@pytest.fixture
def storage_class(space: Space) -> Iterator[str]:
    """A class with a missing provisioner, so its PVCs are never bound."""
    body = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS},
        "provisioner": "nobody.example/none",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    space.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    yield CLASS
    space.kubectl("delete", "storageclass", CLASS, "--wait=false")


def with_package(directory: Path) -> Path:
    (directory / "package").mkdir()
    (directory / "package" / "module.py").write_text("SAID = 'from the package'\n")
    return project(directory, train_py=TRAIN)


def asks_without_a_token(space: Space, pod: str) -> int:
    url = f"{PODS.path(space.name, pod)}:{names.SERVE_PORT}/proxy/v1/manifest"
    answer: httpx.Response = space.api.get(url)
    return answer.status_code


@pytest.mark.long
def test_two_nodes_train_without_a_bound_claim(
    space: Space, storage_class: str, tmp_path: Path
) -> None:
    workspace = {"size": "32Mi", "storageClassName": storage_class}
    space.apply(
        queue(
            "torch",
            space.cluster.trainer,
            nodeResources={"cpus": "200m", "memory": "1Gi"},
            storage={"workspace": workspace},
            reliability={"restartScope": "Gang"},
        )
    )
    with space.history(PODS) as pods:
        options = ("--queue", "torch", "--nodes", "2", "--name", "train")
        run = space.submit(with_package(tmp_path), "python train.py", *options)
        made = set(pods.uids())
    assert run.returncode == 0, run.stderr
    assert "sum 2.0 from the package" in run.stdout
    assert {"train-sync-0", "train-serve-0"} <= made
    status = space.wait_phase("train", "Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1), "a restart needs no upload"
    ready = next(c for c in status["conditions"] if c["type"] == "WorkspaceReady")
    assert (ready["status"], ready["reason"]) == ("True", "DirectDelivery")
    assert "PVC train-workspace is not bound" in ready["message"]
    assert space.get(CLAIMS, "train-workspace")["status"]["phase"] == "Pending"
    space.wait("pod/train-serve-0", "delete")


@pytest.mark.long
def test_head_and_workers_are_served(space: Space, tmp_path: Path) -> None:
    code = "import os, time\nprint('served to the', os.environ['TORCHRUN_ROLE'], flush=True)\n"
    (tmp_path / "train.py").write_text(code + "time.sleep(600)\n")
    volumes = {"workspace": {"source": "zip", "delivery": "direct"}}
    space.apply(job("run", "plain", "exec python3 train.py", 2, volumes=volumes, head={}))
    ended(reloading(space, tmp_path, "sync", "run"))
    space.wait_phase("run", "Running")
    wanted = {"served to the head", "served to the worker"}

    def heard() -> bool:
        logs = "".join(log(space, pod) for pod in workers(space))
        return all(line in logs for line in wanted)

    until(heard, "both say what they run")


# The test above uses storage of the pod; edits work the same way.
@pytest.mark.parametrize("bound", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_edit_reaches_running_workers(
    space: Space, storage_class: str, tmp_path: Path, bound: bool
) -> None:
    workspace = {"source": "zip", "delivery": "direct"}
    if not bound:
        workspace["storageClassName"] = storage_class
    (tmp_path / "old.py").write_text("")
    (tmp_path / "train.py").write_text(STEP.format(number=1))
    space.apply(job("run", "plain", "exec python3 train.py", 2, volumes={"workspace": workspace}))
    ended(reloading(space, tmp_path, "sync", "run"))
    space.wait_phase("run", "Running")
    pods = workers(space)
    until(lambda: all("new code: 1 " in log(space, pod) for pod in pods), "the first code")
    (tmp_path / "old.py").unlink()
    for number in (2, 3):
        (tmp_path / "train.py").write_text(STEP.format(number=number))
        started = time.time()
        assert f"Revision {number}:" in ended(reloading(space, tmp_path, "sync", "run"))
        text = f"new code: {number} "
        until(lambda text=text: all(text in log(space, pod) for pod in pods), "the edit")
        line = max(said_at(space, pod, text) for pod in pods) - started
        print(f"direct, {'claim' if bound else 'own storage'}: sync to first line {line:.2f} s")
    listed = space.kubectl("exec", sorted(pods)[0], "-c", "trainer", "--", "ls", "/app")
    assert listed.split() == ["train.py"]
    assert workers(space) == pods
    status = space.get(TORCHRUN_JOBS, "run")["status"]
    assert (status["phase"], status["workspaceRevision"]) == ("Running", 3)
    assert (status.get("attempt", 0), status.get("restarts", 0)) == (0, 0)


@pytest.mark.long
def test_a_replaced_serve_pod_uses_the_same_claim(space: Space, tmp_path: Path) -> None:
    project(tmp_path, train_py=HANGS_ONCE)
    volumes = {"workspace": {"source": "zip", "delivery": "direct"}}
    space.apply(job("train", "plain", "exec python3 train.py", 2, volumes=volumes))
    code, _, err = plugin(space, tmp_path, "sync", "train")
    assert code == 0, err
    space.wait_phase("train", "Running")
    assert asks_without_a_token(space, "train-serve-0") == 401
    space.kubectl("delete", "pod", "train-serve-0")
    workers = f"{names.JOB_LABEL}=train,{names.COMPONENT_LABEL}={names.WORKER}"
    space.kubectl("delete", "pods", "-l", workers, "--wait=false")
    status = space.wait_phase("train", "Succeeded")
    assert status["attempt"] == 1
    log = space.kubectl("logs", "-l", workers, "-c", "trainer", "--tail=-1")
    assert log.count("ran the code that was served") == 2
