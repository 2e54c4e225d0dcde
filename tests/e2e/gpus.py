"""GPU nodes of kwok beside the real node of the cluster.

Scheduler, Job controller and controller are real. A pod on such a node has only a status.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.cluster import Cluster
from e2e.history import History
from e2e.manifests import job, queue
from e2e.space import Space
from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.resources import PODS
from torchrun_cluster import LocalCluster, binaries

STAGES = Path(__file__).with_name("kwok.yaml")
ENDS = "torchrun-e2e/ends"
ROLE = "torchrun-e2e/role"
FAKE: JsonObject = {ROLE: "fake-gpus"}
TAINT: JsonObject = {"key": ROLE, "value": FAKE[ROLE], "effect": "NoSchedule"}
PER_NODE = 8
ONE_NODE: JsonObject = {"gpus": PER_NODE, "cpus": 8, "memory": "64Gi"}
"""A worker that takes a whole node."""
DDP = """\
import torch, torch.distributed as d
d.init_process_group("gloo")
total = torch.ones(1)
d.all_reduce(total)
print("sum", int(total), flush=True)
d.destroy_process_group()
"""
"""For the pods of the real node."""


def local(cluster: Cluster) -> LocalCluster:
    """The local cluster, to which nodes can be added. Skips on other clusters."""
    if cluster.local is None:
        pytest.skip("this cluster is not ours to install schedulers in")
    return cluster.local


@contextmanager
def installed(cluster: Cluster, addon: str) -> Iterator[None]:
    """Install an addon of the local cluster until the end of the block."""
    local(cluster).install(addon)
    try:
        yield
    finally:
        local(cluster).uninstall(addon)


@contextmanager
def nodes(cluster: Cluster, count: int, log: Path) -> Iterator[None]:
    """Add `count` nodes with eight GPUs each until the end of the block."""
    program = binaries.ensure(["kwok"])["kwok"]
    selector = f"{ROLE}={FAKE[ROLE]}"
    command = [
        *(str(program), "--kubeconfig", str(cluster.kubeconfig), "--config", str(STAGES)),
        *("--manage-nodes-with-label-selector", selector, "--node-lease-duration-seconds", "40"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        for number in range(count):
            add_node(cluster, number)
        yield
        cluster.kubectl("delete", "nodes", "-l", selector)
    finally:
        process.terminate()
        process.wait(30)


def add_node(cluster: Cluster, number: int) -> None:
    """Add a node, and wait until it is ready."""
    name = f"fake-gpus-{number}"
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**FAKE, "kubernetes.io/hostname": name}},
        "spec": {"taints": [TAINT]},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(node))
    cluster.kubectl("wait", f"node/{name}", "--for=condition=Ready", "--timeout=180s")


def gpu_queue(name: str, scheduling: JsonObject, **spec: JsonValue) -> JsonObject:
    """A queue for complete fake nodes, without storage."""
    return queue(
        name,
        "none",
        nodeResources=ONE_NODE,
        distributed={"backend": "nccl"},
        storage={"workspace": {"enabled": False}, "checkpoints": {"enabled": False}},
        scheduling={
            "nodeSelector": FAKE,
            "tolerations": [{**TAINT, "operator": "Equal"}],
            **scheduling,
        },
        **spec,
    )


def end(space: Space, job: str, phase: str, *, index: int | None = None) -> None:
    """End the running workers of a job, or one of them: Succeeded or Failed."""
    selector = f"{names.JOB_LABEL}={job},{names.COMPONENT_LABEL}={names.WORKER}"
    if index is not None:
        selector += f",batch.kubernetes.io/job-completion-index={index}"
    running = ("--field-selector", "status.phase=Running")
    listed = space.kubectl("get", "pods", "-l", selector, *running, "-o", "name").split()
    assert listed, f"no worker of {job} runs"
    space.kubectl("annotate", *listed, f"{ENDS}={phase}")


def assert_smaller_gangs_overtake(space: Space, queue_name: str, count: int, *message: str) -> None:
    """Check that a gang of `count + 1` nodes gets none, and that one of `count` runs meanwhile.

    `message` are texts of the message of the gang that waits.
    """
    space.apply(job("large", queue_name, "train", count + 1))
    with space.history(PODS) as pods:
        status = space.wait_reason("large", "Unschedulable")
        assert status["phase"] == "Queued"
        space.wait_message("large", *message)
        assert "\n" not in space.status("large")["message"]
        space.apply(job("small", queue_name, "train", count))
        space.wait_phase("small", "Running")
        end(space, "small", "Succeeded")
        space.wait_phase("small", "Succeeded")
        assert len(bound(pods, "small")) == count
        assert not bound(pods, "large")


def assert_real_pods_train(space: Space, directory: Path, scheduling: JsonObject) -> None:
    """Check that a submitted run on two real nodes succeeds with this scheduler.

    `directory` gets the script of the run.
    """
    (directory / "train.py").write_text(DDP)
    resources: JsonObject = {"cpus": "250m", "memory": "1Gi"}
    trainer = space.cluster.trainer
    space.apply(queue("torch", trainer, nodeResources=resources, scheduling=scheduling))
    options = ("--queue", "torch", "--nodes", "2", "--name", "real")
    with space.history(PODS) as pods:
        run = space.submit(directory, "python train.py", *options, seconds=240)
        assert run.returncode == 0, run.stderr
        workers = [s for s in pods.states() if s["metadata"]["name"].startswith("real-0-")]
    assert "sum 2" in run.stdout
    assert {state["spec"]["schedulerName"] for state in workers} == {scheduling["scheduler"]}


def assert_a_failed_gang_restarts(space: Space, queue_name: str, groups: str, count: int) -> None:
    """Check that all `count` workers of a gang get nodes again after one of them has failed.

    `groups` is the kind of the attempts' groups, which are deleted when their pods have ended.
    """
    space.apply(job("again", queue_name, "train", count))
    space.wait_phase("again", "Running")
    with space.history(PODS) as pods:
        end(space, "again", "Failed", index=1)
        space.wait("torchrunjob/again", "jsonpath={.status.attempt}=1")
        space.wait_phase("again", "Running")
        listed = space.kubectl("get", groups, "-o", "name").split()
        assert listed
        end(space, "again", "Succeeded")
        assert space.wait_phase("again", "Succeeded")["restarts"] == 1
        assert len({name for name in bound(pods, "again") if "-r1-" in name}) == count
    for group in listed:
        space.wait(group, "delete")


def bound(pods: History, job: str) -> set[str]:
    """Names of all pods of a job that were ever bound to a node."""
    return {
        state["metadata"]["name"]
        for state in pods.states()
        if state["metadata"]["labels"].get(names.JOB_LABEL) == job and state["spec"].get("nodeName")
    }


def assert_never_together(pods: History, *jobs: str) -> None:
    """Check that two of the jobs never had nodes at the same time."""
    holders: dict[str, str] = {}
    for state in pods.states():
        name, job = state["metadata"]["name"], state["metadata"]["labels"].get(names.JOB_LABEL)
        ended = state["status"].get("phase") in ("Succeeded", "Failed")
        if job in jobs and state["spec"].get("nodeName") and not ended:
            holders[name] = job
        else:
            holders.pop(name, None)
        assert len(set(holders.values())) <= 1, f"two gangs hold nodes: {holders}"
