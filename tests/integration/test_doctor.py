"""`kubectl torchrun doctor` on a real API server with nodes and storage classes of a small cluster.

No controller runs, which an administrator sees as a failure.
"""

import json
import os
from collections.abc import Iterator

import pytest

from integration.controller_process import eventually, install_crds
from integration.test_plugin import USERS, Laptop, laptop
from torchrun_api.json import JsonObject
from torchrun_cluster import LocalCluster, Size

__all__ = ["laptop"]

Findings = list[dict[str, str]]
GPU = "nvidia.com/gpu"
DEFAULT: JsonObject = {"storageclass.kubernetes.io/is-default-class": "true"}


@pytest.fixture
def crds() -> Iterator[LocalCluster]:
    """A control plane for each test: its nodes and storage classes concern all namespaces."""
    with LocalCluster(name=f"test-doctor-{os.getpid()}", size=Size.CONTROL_PLANE) as cluster:
        install_crds(cluster)
        yield cluster


def node(gpus: int) -> JsonObject:
    """A Ready node with GPUs."""
    resources: JsonObject = {"cpu": "96", "memory": "1Ti", "pods": "110", GPU: str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "gpu-1"},
        "status": {
            "allocatable": resources,
            "capacity": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def storage_class(name: str, provisioner: str, annotations: JsonObject | None = None) -> JsonObject:
    """A StorageClass."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations or {}},
        "provisioner": provisioner,
    }


def queue(laptop: Laptop, checkpoints: JsonObject) -> JsonObject:
    """A queue that requests 8 GPUs for a node."""
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunQueue",
        "metadata": {"name": "gpu", "namespace": laptop.namespace},
        "spec": {
            "image": "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
            "nodeResources": {"gpus": 8, "cpus": 90, "memory": "900Gi"},
            "storage": {"checkpoints": {"size": "100Gi", **checkpoints}},
        },
    }


LOCAL = storage_class("local-path", "rancher.io/local-path", DEFAULT)
SHARED = storage_class("nfs", "nfs.csi.k8s.io")
FITS: JsonObject = {"storageClassName": "nfs"}


def apply(cluster: LocalCluster, *objects: JsonObject) -> None:
    """Create or change the objects."""
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=listed)


def doctor(laptop: Laptop, controller: str = "fail") -> Findings:
    """The findings, except for the one with this verdict that no controller runs."""
    code, out, err = laptop.run("doctor", "-o", "json")
    findings: Findings = json.loads(out)["findings"]
    (found,) = of(findings, "controller")
    assert found["verdict"] == controller
    assert code == any(f["verdict"] == "fail" for f in findings), out + err
    return [f for f in findings if f is not found]


def of(findings: Findings, subject: str) -> Findings:
    return [finding for finding in findings if finding["subject"] == subject]


def test_a_queue_fits_the_cluster(laptop: Laptop) -> None:
    apply(laptop.cluster, node(8), LOCAL, SHARED, queue(laptop, FITS))
    findings = doctor(laptop)
    assert not [f for f in findings if f["verdict"] in ("warn", "fail", "skip")]
    assert "at most 8 on one" in of(findings, "GPUs")[0]["text"]


def test_a_queue_that_does_not_fit_is_reported(laptop: Laptop) -> None:
    apply(laptop.cluster, node(4), LOCAL, queue(laptop, {}))
    problems = [
        f"{f['subject']}: {f['text']}" for f in doctor(laptop) if f["verdict"] in ("warn", "fail")
    ]
    expected = (
        "storage: No storage class is known to support ReadWriteMany",
        "storage: Queue gpu has its checkpoints in class local-path",
        "machines: Queue gpu requests 8 nvidia.com/gpu for a node, but no machine has more than 4",
    )
    assert len(problems) == len(expected), problems
    for problem, text in zip(problems, expected, strict=True):
        assert problem.startswith(text)


def test_what_a_user_may_not_read_is_not_checked(laptop: Laptop) -> None:
    cluster, namespace = laptop.cluster, laptop.namespace
    cluster.kubectl("apply", "-f", str(USERS))
    cluster.kubectl("create", "rolebinding", "anna", "--clusterrole=edit", "--user=anna",
                    "-n", namespace)  # fmt: skip
    # The controller-manager adds the rules to the role edit, and those of view after them.
    for action in ("create torchrunjobs", "list torchrunqueues"):
        may = ("auth", "can-i", *action.split(), "--as=anna", "-n", namespace)
        eventually(action, lambda may=may: cluster.kubectl(*may, check=False).returncode == 0)
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json").stdout)
    for user in config["users"]:
        user["user"]["as"] = "anna"
    kubeconfig = laptop.project / "anna.json"
    kubeconfig.write_text(json.dumps(config))
    apply(cluster, node(8), LOCAL, SHARED, queue(laptop, FITS))
    whole = {f["subject"] for f in doctor(laptop)}
    laptop.kubeconfig = str(kubeconfig)
    findings = doctor(laptop, controller="skip")
    skipped = {f["subject"] for f in findings if f["verdict"] == "skip"}
    assert skipped == {"storage", "machines", "autoscaler"}
    assert {f["subject"] for f in findings} == whole - {"GPUs"}
    assert all("no permission to read it" in f["text"] for f in findings if f["verdict"] == "skip")
    (permissions,) = of(findings, "permissions")
    assert permissions["verdict"] == "ok"
    assert not [f for f in findings if f["verdict"] == "fail"]
