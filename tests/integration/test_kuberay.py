"""The RayCluster of the SDK under the real KubeRay operator: its pods and its deletion."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

import torchrun_sdk as kt
from integration.controller_process import eventually, install_crds
from torchrun_cluster import LocalCluster, Size, binaries
from torchrun_sdk.cluster import kuberay, manifest
from torchrun_sdk.cluster.kubectl import Kubectl

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
JOB = "run-bcdfg"
COMPUTE = {"cpus": 4, "memory": "16Gi", "image": "ray:1", "env": {"A": "1"}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    with LocalCluster(name=f"kuberay-{os.getpid()}", size=Size.CONTROL_PLANE) as running:
        install_crds(running)
        programs = binaries.ensure(["kubectl"])["kubectl"].parent
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def listed(kind: str) -> list[dict[str, Any]]:
    return json.loads(Kubectl().run("get", kind, "--output=json"))["items"]


def test_a_raycluster_lives_as_long_as_its_torchrunjob(cluster: LocalCluster) -> None:
    kubectl = Kubectl()
    large = {"gpus": 8, "cpus": 32}
    volume = kt.Volume("shared", "/data")
    compute = kt.Compute(volumes=[volume], queue="q", **COMPUTE).distribute(
        "ray", 3, worker_node_options=large, operator="kuberay"
    )
    with pytest.raises(kt.UsageError, match=r"requires KubeRay .* which is not installed"):
        kuberay.check(compute, kubectl)
    cluster.install("kuberay")
    kuberay.check(compute, kubectl)
    kubectl.run("create", "-f", "-", stdin=json.dumps(manifest.build(JOB, compute)))
    uid = kubectl.run("get", "torchrunjob", JOB, "--output=jsonpath={.metadata.uid}").strip()
    rayjob = kuberay.build(JOB, uid, compute, "secret")
    kubectl.run("create", "-f", "-", stdin=json.dumps(rayjob))
    eventually("a head and three workers", lambda: len(listed("pods")) == 4, 60)
    assert kuberay.pending_reason(JOB, kubectl) == "RayJob is Initializing"
    containers = [pod["spec"]["containers"][0] for pod in listed("pods")]
    variables = sorted(
        (each["name"], each["resources"]["limits"].get("nvidia.com/gpu")) for each in containers
    )
    assert variables == [("ray-head", None)] + [("ray-worker", "8")] * 3
    for each in containers:
        assert each["image"] == "ray:1"
        assert {"name": "A", "value": "1"} in each["env"]
        assert "/data" in [mount["mountPath"] for mount in each["volumeMounts"]]
    services = {item["metadata"]["name"]: item["spec"] for item in listed("services")}
    assert services[kuberay.service(JOB)]["clusterIP"] == "None"
    kubectl.run("delete", "torchrunjob", JOB)
    kinds = ("rayjobs.ray.io", "rayclusters.ray.io", "pods")
    eventually("all of it is gone", lambda: not any(listed(kind) for kind in kinds), 60)
