"""Bodies of PVCs, and the volumes and mounts of workers."""

import posixpath

from torchrun_api import names
from torchrun_api.contract import launch
from torchrun_api.json import JsonObject, object_at
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import CLAIMS
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.base import metadata
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, VolumeSource

PODINFO_DIR = posixpath.dirname(launch.START_FILE.default)
WORKSPACE_SOURCE_DIR = "/torchrun-workspace"
STATE_DIR = "/torchrun-state"
# In the workspace PVC; the sync pod creates it.
STATE_SUBPATH = "state"


def claim(job: TorchrunJob, source: VolumeSource, component: str, first_pod: str = "") -> Apply:
    """Return a PVC. A retained one has no owner: garbage collection would delete it.

    `first_pod` is the pod that is created with it, if one is.
    """
    meta = metadata(job, source.name, component)
    if first_pod:
        meta["annotations"] = {names.FIRST_POD: first_pod}
    if source.retain:
        del meta["ownerReferences"]
        object_at(meta, "labels")[names.RETAINED_LABEL] = job.metadata.name
    spec: JsonObject = {
        "accessModes": [source.access_mode],
        "resources": {"requests": {"storage": source.size}},
    }
    if source.storage_class_name is not None:
        spec["storageClassName"] = source.storage_class_name
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": spec,
    }
    return Apply(CLAIMS, body)


def keeps_state(run: ResolvedSpec) -> bool:
    """Whether workers have a directory that outlives their gang, on a PVC of the controller."""
    workspace = run.workspace
    if workspace is None or workspace.existing or workspace.served:
        return False
    return workspace.access_mode != "ReadOnlyMany"


def volumes(job: TorchrunJob, run: ResolvedSpec) -> list[JsonObject]:
    """Return the v1 Volumes of a worker."""
    shm: JsonObject = {"medium": "Memory"}
    if run.shm_size is not None:
        shm["sizeLimit"] = run.shm_size
    volumes: list[JsonObject] = [
        {"name": "torchrun", "emptyDir": {"sizeLimit": "16Mi"}},
        {"name": "shm", "emptyDir": shm},
        {
            "name": "podinfo",
            "downwardAPI": {
                "items": [
                    {"path": "annotations", "fieldRef": {"fieldPath": "metadata.annotations"}}
                ]
            },
        },
    ]
    if run.workspace is not None and run.workspace.existing:
        volumes.append(_claim_volume("workspace", run.workspace.name, read_only=True))
    elif run.workspace is not None:
        if run.workspace.served:
            volumes.append(_token_volume())
        else:
            read_only = not keeps_state(run)
            volumes.append(
                _claim_volume("workspace-source", run.workspace.name, read_only=read_only)
            )
        volumes.append({"name": "workspace", "emptyDir": {"sizeLimit": run.workspace.size}})
    if run.checkpoints is not None:
        volumes.append(_checkpoints_volume(run.checkpoints))
    for dataset in run.datasets:
        name = f"dataset-{dataset.name}"
        volumes.append(_claim_volume(name, dataset.claim_name, read_only=dataset.read_only))
    return volumes + [dict(volume) for volume in job.spec.volumes.additional_volumes]


def mounts(job: TorchrunJob, run: ResolvedSpec) -> list[JsonObject]:
    """Return the v1 VolumeMounts of the training container."""
    mounts: list[JsonObject] = [
        {"name": "torchrun", "mountPath": names.LAUNCHER_DIR},
        {"name": "podinfo", "mountPath": PODINFO_DIR, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # libraries expect it
    ]
    if run.workspace is not None and run.workspace.existing:
        mounts.append(_existing_mount(run.workspace))
    elif run.workspace is not None:
        source = "workspace-token" if run.workspace.served else "workspace-source"
        mounts.append({"name": source, "mountPath": WORKSPACE_SOURCE_DIR, "readOnly": True})
        mounts.append({"name": "workspace", "mountPath": run.workspace.mount_path})
    if keeps_state(run):
        # The same volume: older kubelets never mount a PVC that a pod has as two volumes.
        mounts.append(
            {"name": "workspace-source", "mountPath": STATE_DIR, "subPath": STATE_SUBPATH}
        )
    if run.checkpoints is not None:
        mounts.append({"name": "checkpoints", "mountPath": run.checkpoints.mount_path})
    for dataset in run.datasets:
        mount: JsonObject = {"name": f"dataset-{dataset.name}", "mountPath": dataset.mount_path}
        if dataset.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    return mounts + [dict(mount) for mount in job.spec.volumes.additional_mounts]


def _existing_mount(workspace: VolumeSource) -> JsonObject:
    """Return the mount of an existing PVC. The controller copies nothing."""
    mount: JsonObject = {
        "name": "workspace",
        "mountPath": workspace.mount_path,
        "readOnly": True,
    }
    if workspace.sub_path:
        mount["subPath"] = workspace.sub_path
    return mount


def _token_volume() -> JsonObject:
    """Return the volume of a token for the workspace only. The kubelet renews it."""
    token: JsonObject = {
        "path": "token",
        "audience": names.WORKSPACE_AUDIENCE,
        "expirationSeconds": 3600,
    }
    return {
        "name": "workspace-token",
        "projected": {"sources": [{"serviceAccountToken": token}]},
    }


def _checkpoints_volume(source: VolumeSource) -> JsonObject:
    if not source.host_path:
        return _claim_volume("checkpoints", source.name, read_only=False)
    directory: JsonObject = {"path": source.host_path, "type": "DirectoryOrCreate"}
    return {"name": "checkpoints", "hostPath": directory}


def _claim_volume(name: str, claim_name: str, *, read_only: bool) -> JsonObject:
    claim: JsonObject = {"claimName": claim_name}
    if read_only:
        claim["readOnly"] = True
    return {"name": name, "persistentVolumeClaim": claim}
