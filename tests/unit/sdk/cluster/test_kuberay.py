"""Ray by KubeRay: its objects, its lifetime, and a missing operator."""

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrun_sdk as kt
from ports import free_port
from torchrun_sdk.cluster import kuberay, manifest
from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.spec import Reference
from torchrun_sdk.worker import control_port

from ..pods import SECONDS, replace_text

SECRET = "of-this-call"
LARGE = {"gpus": 8, "cpus": 32, "memory": "256Gi"}


def compute(**more: object) -> kt.Compute:
    volume = kt.Volume("shared", "/data")
    made = kt.Compute(cpus=4, memory="16Gi", image="ray:1", env={"A": 1}, volumes=[volume], **more)
    return made.distribute("ray", 3, worker_node_options=LARGE, operator="kuberay")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHRUN_SDK_CPU_ONLY", "TORCHRUN_SDK_IMAGE"):
        monkeypatch.delenv(name, raising=False)


def test_head_and_workers_have_their_own_resources() -> None:
    body = kuberay.build("run", "u1", compute(launch_timeout=90), "s")
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("TorchrunJob", "run", "u1")
    cluster = body["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert {workers[count] for count in ("replicas", "minReplicas", "maxReplicas")} == {3}
    head, worker = (
        part["template"]["spec"]["containers"][0] for part in (cluster["headGroupSpec"], workers)
    )
    small, large = {"cpu": "4", "memory": "16Gi"}, {"cpu": "32", "memory": "256Gi"}
    assert head["resources"] == {"requests": small, "limits": small}
    assert worker["resources"]["limits"] == {**large, "nvidia.com/gpu": "8"}
    for container in (head, worker):
        assert (container["image"], container["env"]) == ("ray:1", [{"name": "A", "value": "1"}])
        assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/data"}]
    assert workers["rayStartParams"] == {}
    assert body["spec"]["shutdownAfterJobFinishes"] is True
    *_, limit, _, _, shown = shlex.split(body["spec"]["entrypoint"])
    assert limit == "90"
    assert shown == control_port.digest("s")  # more people can read a RayJob than may use it


def test_the_job_itself_is_one_pod_without_gpus() -> None:
    body = manifest.build("run", compute(gpus=1))
    assert body["spec"]["numNodes"] == 1
    assert body["spec"]["nodeResources"] == {"gpus": 0, "cpus": "4", "memory": "16Gi"}
    assert body["metadata"]["labels"]["torchrun.ai/sdk"] == "ray"


def test_gpus_are_simulated_on_cpu_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRUN_SDK_CPU_ONLY", "1")
    spec = kuberay.build("run", "u1", compute(), SECRET)["spec"]["rayClusterSpec"]
    (workers,) = spec["workerGroupSpecs"]
    assert workers["rayStartParams"] == {"num-gpus": "8"}
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"] == {}


def test_warm_pods_belong_to_an_equal_cluster(tmp_path: Path) -> None:
    def key(workers: int, operator: str | None) -> str:
        asked = kt.Compute(image="ray:1").distribute("ray", workers, operator=operator)
        return manifest.gang_key(asked, Reference("f"), tmp_path)

    assert key(1, "kuberay") == key(1, "kuberay")
    assert len({key(1, "kuberay"), key(2, "kuberay"), key(1, None)}) == 3


@pytest.mark.parametrize(("framework", "operator"), [("pytorch", "kuberay"), ("ray", "kube")])
def test_other_operators_are_refused(framework: str, operator: str) -> None:
    with pytest.raises(kt.UsageError, match=f"operator is '{operator}'"):
        kt.Compute().distribute(framework, operator=operator)


def work() -> int:
    return 1


@pytest.mark.long
def test_nothing_is_created_without_kuberay(cluster: Path) -> None:
    remote = kt.fn(work).to(kt.Compute(image="ray:1")).distribute("ray", operator="kuberay")
    (cluster / "refuse").write_text("get --raw:Error from server (NotFound): no such resource")
    with pytest.raises(kt.UsageError, match=r"Install it .* or remove operator"):
        remote()
    (cluster / "refuse").write_text("get --raw:Unauthorized")
    with pytest.raises(kt.ClusterError, match="Unauthorized"):
        remote()
    with pytest.raises(kt.UsageError, match="requires Compute"):
        remote.to(kt.Compute())()
    commands = (cluster / "commands").read_text()
    assert "submit" not in commands
    assert "create" not in commands


@pytest.mark.long
def test_a_failed_creation_leaves_no_objects(cluster: Path) -> None:
    (cluster / "slow").touch()  # pods would get a copy of the checkout with its environments
    (cluster / "refuse").write_text("create:rayjobs.ray.io is forbidden")
    with pytest.raises(kt.ClusterError, match="is forbidden"):
        kt.fn(work).to(kt.Compute(image="ray:1")).distribute("ray", operator="kuberay")()
    assert not (cluster / "job.json").exists()


@pytest.mark.long
def test_a_cluster_that_does_not_start_is_explained_by_its_pods(cluster: Path) -> None:
    (cluster / "slow").touch()
    (cluster / "rayjobs.ray.io.json").write_text('{"status": {"jobDeploymentStatus": "Waits"}}')
    pulling = {"name": "c", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}
    usual = {"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}}
    unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "8"}
    statuses = {
        "head": {"containerStatuses": [pulling]},
        "fine": {"containerStatuses": [usual], "conditions": [{**unbound, "status": "True"}]},
        "worker": {"conditions": [unbound]},
    }
    pods = [{"metadata": {"name": name}, "status": status} for name, status in statuses.items()]
    replace_text(cluster / "pods.json", json.dumps({"items": pods}))
    remote = kt.fn(work).to(kt.Compute(image="ray:1", launch_timeout=1))
    with pytest.raises(kt.LaunchTimeout) as raised:
        remote.distribute("ray", operator="kuberay")()
    message = "; RayJob is Waits; head: ErrImagePull: denied; worker: Unschedulable: 8"
    assert str(raised.value).endswith(message)
    made = json.loads((cluster / "created").read_text())
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert not (cluster / "job.json").exists()
    (cluster / "rayjobs.ray.io.json").write_text("{}")
    assert "does KubeRay's operator run?" in kuberay.pending_reason("x", Kubectl())
    (cluster / "refuse").write_text("get rayjobs:not found")
    assert kuberay.pending_reason("x", Kubectl()) == "its RayJob: error: not found"


class Held:
    """The entrypoint of the head of a RayCluster, with short timeouts."""

    def __init__(self, first: float, again: float) -> None:
        self.port = free_port()
        words = shlex.split(kuberay.build("run", "u1", compute(), SECRET)["spec"]["entrypoint"])
        words = [
            sys.executable,
            "-u",
            *words[1:-4],
            str(first),
            str(again),
            str(self.port),
            words[-1],
        ]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def connect(self) -> socket.socket:
        while True:
            try:
                pod = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
                assert control_port.show(pod, SECRET, SECONDS)
                return pod
            except ConnectionRefusedError:
                assert self.process.poll() is None
                time.sleep(0.01)


@pytest.fixture
def held() -> Iterator:
    made: list[Held] = []

    def start(first: float, again: float) -> Held:
        made.append(Held(first, again))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


@pytest.mark.long
def test_the_cluster_stays_until_a_pod_is_done(held) -> None:
    holding = held(SECONDS, SECONDS)
    holding.connect().close()  # a lost connection: another gang follows
    with holding.connect() as pod:
        with pytest.raises(subprocess.TimeoutExpired):
            holding.process.wait(0.5)
        pod.sendall(control_port.DONE)
        assert holding.process.wait(SECONDS) == 0


@pytest.mark.long
@pytest.mark.parametrize("comes", [False, True])
def test_an_unused_cluster_ends(held, comes: bool) -> None:
    holding = held(SECONDS if comes else 0.2, 0.2)
    if comes:
        holding.connect().close()
    assert holding.process.wait(SECONDS) == 1
    assert "no pod has connected for 0.2 s" in holding.process.stdout.read()
