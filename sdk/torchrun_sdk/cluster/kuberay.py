"""Ray with KubeRay: a RayCluster in addition to the pod of the call.

A RayJob owns the cluster: the operator ends the cluster when the pod is done, with or without a
client.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.compute import Compute, cpu_only
from torchrun_sdk.errors import ClusterError, UsageError
from torchrun_sdk.worker import control_port
from torchrun_sdk.worker.ray import DASHBOARD, PORT

_API = "ray.io/v1"
# Label of the pods of the cluster: name of the TorchrunJob.
_JOB = "torchrun.ai/sdk-ray"
_GPU = "nvidia.com/gpu"
_PORTS = {"gcs-server": PORT, "dashboard": DASHBOARD, "client": 10001, "hold": control_port.PORT}
_AGAIN = 300  # seconds to wait for another pod after one is lost
# Initial reasons of every waiting container.
_USUAL = ("ContainerCreating", "PodInitializing")


def check(compute: Compute, kubectl: Kubectl) -> None:
    """Raises UsageError without KubeRay or an image for its pods; ClusterError."""
    if not compute.resolved_image():
        raise UsageError(
            'operator="kuberay" requires Compute(image=...) with an image that contains Ray.'
            " KubeRay does not use the image of the queue."
        )
    try:
        kubectl.run("get", "--raw", f"/apis/{_API}")
    except ClusterError as error:
        if "NotFound" not in str(error):
            raise
        raise UsageError(
            f'operator="kuberay" requires KubeRay ({_API}), which is not installed. Install it'
            " (https://docs.ray.io/en/latest/cluster/kubernetes), or remove operator to run Ray in"
            " the pods of the job."
        ) from error


def service(name: str) -> str:
    """The host name of the cluster's head."""
    return f"{name}-ray"


def build(name: str, uid: str, compute: Compute, secret: str) -> dict[str, Any]:
    """The RayJob of a TorchrunJob, which is deleted with it.

    The head has the resources of the Compute; worker_node_options override them for workers.
    secret: of the call.
    """
    workers, options = compute.distribution.workers, compute.distribution.worker_node_options or {}
    own = {"gpus": compute.gpus, "cpus": compute.cpus, "memory": compute.memory}
    head = _template(name, "ray-head", compute, own)
    head["spec"]["containers"][0]["ports"] = [
        {"name": port, "containerPort": number} for port, number in _PORTS.items()
    ]
    counted = options.get("gpus", compute.gpus or 0)
    program = shlex.quote(Path(control_port.__file__).read_text(encoding="utf-8"))
    owner = {"apiVersion": "torchrun.ai/v1alpha1", "kind": "TorchrunJob", "name": name, "uid": uid}
    return {
        "apiVersion": _API,
        "kind": "RayJob",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "spec": {
            "entrypoint": f"python3 -c {program} {compute.launch_timeout:g} {_AGAIN}"
            f" {control_port.PORT} {control_port.digest(secret)}",
            "submissionMode": "HTTPMode",
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {},
                    "headService": {
                        "metadata": {"name": service(name)},
                        "spec": {"clusterIP": "None"},
                    },
                    "template": head,
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": workers,
                        "minReplicas": workers,
                        "maxReplicas": workers,
                        "rayStartParams": {"num-gpus": str(counted)} if cpu_only() else {},
                        "template": _template(name, "ray-worker", compute, {**own, **options}),
                    }
                ],
            },
        },
    }


def _template(
    name: str, container: str, compute: Compute, resources: dict[str, Any]
) -> dict[str, Any]:
    quantities = {
        "cpu": resources["cpus"],
        "memory": resources["memory"],
        _GPU: resources["gpus"] or None,
    }
    resources = {key: str(value) for key, value in quantities.items() if value is not None}
    if cpu_only():
        resources = {}
    pod_container = {
        "name": container,
        "image": compute.resolved_image(),
        "env": compute.variables(),
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [volume.mount() for volume in compute.volumes],
    }
    return {
        "metadata": {"labels": {_JOB: name}},
        "spec": {
            "containers": [pod_container],
            "volumes": [volume.in_pod() for volume in compute.volumes],
        },
    }


def pending_reason(name: str, kubectl: Kubectl) -> str:
    """Why the Ray cluster is not ready: the state of its RayJob and of its pods."""
    try:
        job = json.loads(kubectl.run("get", "rayjobs.ray.io", name, "--output=json"))
        words = ["get", "pods", "--selector", f"{_JOB}={name}", "--output=json"]
        pods = json.loads(kubectl.run(*words))["items"]
    except ClusterError as error:
        return f"its RayJob: {error}"
    state = (job.get("status") or {}).get("jobDeploymentStatus")
    if not state:
        return "its RayJob has no status: does KubeRay's operator run?"
    reasons = [f"{pod['metadata']['name']}: {why}" for pod in pods if (why := _trouble(pod))]
    return "; ".join([f"RayJob is {state}", *reasons])


def _trouble(pod: dict[str, Any]) -> str:
    """Why a pod does not run, "" if unknown."""
    status = pod.get("status") or {}
    reasons = [
        (state.get("waiting") or {})
        for kind in ("initContainerStatuses", "containerStatuses")
        for container in status.get(kind) or ()
        for state in (container.get("state") or {}, container.get("lastState") or {})
    ]
    reasons = [waiting for waiting in reasons if waiting.get("reason") not in (None, *_USUAL)]
    reasons += [
        condition
        for condition in status.get("conditions") or ()
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
    ]
    return ", ".join(f"{each.get('reason')}: {each.get('message', '')}" for each in reasons[:1])
