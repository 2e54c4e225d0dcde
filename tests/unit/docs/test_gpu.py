"""The pods of the manifests of docs/gpu.md and docs/debugging.md have what the page promises."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pages import ROOT, blocks
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import JOBS
from unit.docs.test_manifests import objects
from world import World, make_job

PAGES = [ROOT / "docs" / name for name in ("gpu.md", "debugging.md")]
OBJECTS = [
    body
    for page in PAGES
    for block in blocks(page)
    if block.language == "yaml"
    for body in objects(block)
]
QUEUES = {body["metadata"]["name"]: body for body in OBJECTS if body["kind"] == "TorchrunQueue"}
JOBS_OF_PAGE = {body["metadata"]["name"]: body for body in OBJECTS if body["kind"] == "TorchrunJob"}


def queue_of(body: dict[str, Any]) -> TorchrunQueue:
    metadata = {**body["metadata"], "namespace": "ml", "uid": "uid-queue"}
    return msgspec.convert({**body, "metadata": metadata}, TorchrunQueue)


def pod_of(job: TorchrunJob, queue: TorchrunQueue) -> dict[str, Any]:
    """The v1 PodTemplateSpec of the first gang."""
    plan = World(of_queue(job, queue), queue).step()
    (child,) = [write.body for write in plan.applies if write.kind == JOBS]
    return msgspec.convert(child, dict[str, Any])["spec"]["template"]


def of_queue(job: TorchrunJob, queue: TorchrunQueue) -> TorchrunJob:
    return replace(job, spec=replace(job.spec, job_queue=queue.metadata.name))


def job_of(name: str) -> TorchrunJob:
    return make_job(**JOBS_OF_PAGE[name]["spec"])


def trainer(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = [one for one in pod["spec"]["containers"] if one["name"] == "trainer"]
    return container


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in trainer(pod)["env"]}


def test_a_gpu_queue() -> None:
    pod = pod_of(job_of("pretrain-h100"), queue_of(QUEUES["h100"]))
    assert trainer(pod)["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert variables(pod)["PET_NPROC_PER_NODE"] == "8"
    assert variables(pod)["TORCHRUN_BACKEND"] == "nccl"
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["metadata"]["labels"]["torchrun.ai/gpu-type"] == "h100"
    (shm,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_mig() -> None:
    pod = pod_of(make_job(numNodes=1), queue_of(QUEUES["mig"]))
    assert trainer(pod)["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "1"


def test_the_variables_of_queue_and_job() -> None:
    queue = queue_of(QUEUES["roce"])
    env = variables(pod_of(job_of("debug-network"), queue))
    assert env["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert env["NCCL_DEBUG"] == "INFO"
    override = make_job(numNodes=1, env=[{"name": "NCCL_SOCKET_IFNAME", "value": "=eth1"}])
    assert variables(pod_of(override, queue))["NCCL_SOCKET_IFNAME"] == "=eth1"


def test_rdma() -> None:
    pod = pod_of(make_job(numNodes=2), queue_of(QUEUES["rdma"]))
    assert trainer(pod)["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    assert trainer(pod)["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma-net"


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_pod_security_refuses_the_capability(level: str) -> None:
    body = QUEUES["rdma"]
    strict = queue_of({**body, "spec": {**body["spec"], "podSecurity": level}})
    plan = World(of_queue(make_job(numNodes=2), strict), strict).step()
    assert plan.status is not None
    assert "IPC_LOCK" in (plan.status.message or "")


def test_the_network_of_the_node() -> None:
    (fragment,) = [body for body in OBJECTS if "networking" in body["spec"]]
    pod = pod_of(make_job(numNodes=2), queue_of(fragment))
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_a_job_may_ask_for_the_network_of_the_node() -> None:
    queue = queue_of(QUEUES["mig"])
    pod = pod_of(make_job(numNodes=1, podTemplate={"spec": {"hostNetwork": True}}), queue)
    assert pod["spec"]["hostNetwork"] is True
    assert "dnsPolicy" not in pod["spec"]


def test_the_variables_of_the_flight_recorder() -> None:
    (fragment,) = [
        body for body in OBJECTS if body["metadata"]["name"] == "part" and "env" in body["spec"]
    ]
    pod = pod_of(make_job(**fragment["spec"]), queue_of(QUEUES["h100"]))
    mounts = {mount["mountPath"] for mount in trainer(pod)["volumeMounts"]}
    assert variables(pod)["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].rpartition("/")[0] in mounts
