"""The pod that reads the workspace PVC of a job without running workers."""

from collections.abc import Iterator

import anyio

from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.pods import trouble
from kubectl_torchrun.cluster.slices import (
    CLAIMS,
    PODS,
    QUEUES,
    JobSlice,
    PlacementSlice,
    QueueSlice,
)
from kubectl_torchrun.errors import ClusterProblem
from torchrun_api import names
from torchrun_api.json import JsonObject

CLAIM = "/claim"
CONTAINER = "reader"
LIFETIME_SECONDS = 900  # the pod stops by itself if the plugin was killed
_READY_SECONDS = 60.0
_USER = 65532  # any user but root: all users can read the files
_SHARED = frozenset({"ReadWriteMany", "ReadOnlyMany"})


async def start(api: Api, job: JobSlice, reader: str) -> None:
    """Create the pod and wait until it runs. Raises ClusterProblem."""
    claim = names.workspace_claim(job.metadata.name)
    queue = await _read_queue(api, job)
    image = await _find_image(api, job, queue)
    placement = _placement(job, queue, with_workers=await _is_for_one_node(api, claim))
    try:
        await api.create(PODS, body(job, reader, claim, image, placement))
    except RequestError as error:
        raise ClusterProblem(f"Cannot create a pod to read PVC {claim}: {error}") from error
    why = f"it did not start within {_READY_SECONDS:.0f} s"
    with anyio.move_on_after(_READY_SECONDS):
        while True:
            try:
                pod = await api.get(PODS, reader)
            except RequestError as error:
                why = str(error)
                break
            if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None:
                return
            why = trouble(pod) or why
            if pod.status.phase == "Failed":
                break
            await anyio.sleep(0.2)
    raise ClusterProblem(f"Pod {reader} cannot read PVC {claim}: {why}")


async def _read_queue(api: Api, job: JobSlice) -> QueueSlice | None:
    """The job's queue; None if it is gone, or the user may not read it."""
    try:
        return await api.get(QUEUES, job.spec.job_queue)
    except RequestError:
        return None


async def _find_image(api: Api, job: JobSlice, queue: QueueSlice | None) -> str:
    """An image that the job's nodes can pull: the sync pod's or the launcher's, else the job's.

    Raises ClusterProblem if there is none.
    """
    selector = f"{names.JOB_LABEL}={job.metadata.name}"
    pods = await api.read(PODS.path(api.namespace), {"labelSelector": selector})
    runtime_containers = (names.SYNC_CONTAINER, names.LAUNCHER_CONTAINER)
    for container in _containers(pods):
        if container.get("name") in runtime_containers and container.get("image"):
            return str(container["image"])
    image = job.spec.image or (queue.spec.image if queue is not None else None)
    if not image:
        why = "cannot be read" if queue is None else "has none"
        raise ClusterProblem(
            "Cannot find an image for a pod that reads the PVC: queue"
            f" {job.spec.job_queue} {why}. Set spec.image of the queue."
        )
    return image


async def _is_for_one_node(api: Api, claim: str) -> bool:
    """Whether only pods of one node can mount the PVC. Assume it if the user may not read it."""
    try:
        modes = (await api.get(CLAIMS, claim)).spec.access_modes
    except RequestError:
        return True
    return not _SHARED.intersection(modes)


def _placement(job: JobSlice, queue: QueueSlice | None, *, with_workers: bool) -> JsonObject:
    """The fields for image pulls and nodes, as of the job's sync pods.

    A PVC for one node can be mounted in the zone, or on the node, of the workers that wrote to it.
    """
    own = job.spec.scheduling
    shared = queue.spec.scheduling if queue is not None else PlacementSlice()
    secrets = queue.spec.image_pull_secrets if queue is not None else ()
    placement: JsonObject = {
        "imagePullSecrets": [{"name": secret.name} for secret in secrets],
        "tolerations": [*shared.tolerations, *own.tolerations],
    }
    if with_workers:
        placement["nodeSelector"] = {**shared.node_selector, **own.node_selector}
        placement["affinity"] = shared.affinity if own.affinity is None else own.affinity
    return {name: value for name, value in placement.items() if value}


def _containers(pods: JsonObject) -> Iterator[JsonObject]:
    items = pods.get("items")
    for pod in items if isinstance(items, list) else []:
        spec = pod.get("spec") if isinstance(pod, dict) else None
        for key in ("containers", "initContainers"):
            containers = spec.get(key) if isinstance(spec, dict) else None
            yield from (
                c
                for c in (containers if isinstance(containers, list) else [])
                if isinstance(c, dict)
            )


def body(job: JobSlice, name: str, claim: str, image: str, placement: JsonObject) -> JsonObject:
    """A pod that mounts the PVC read-only and sleeps. Meets Pod Security restricted."""
    container: JsonObject = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", str(LIFETIME_SECONDS)],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The whole PVC: the kubelet would create a missing subPath.
        "volumeMounts": [{"name": "claim", "mountPath": CLAIM, "readOnly": True}],
    }
    owner: JsonObject = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "name": job.metadata.name,
        "uid": job.metadata.uid,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                names.NAME_LABEL: "kubectl-torchrun",
                names.COMPONENT_LABEL: "log-reader",
                names.INSTANCE_LABEL: job.metadata.name,
            },
            "ownerReferences": [owner],
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIFETIME_SECONDS,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": claim}}],
            **placement,
        },
    }
