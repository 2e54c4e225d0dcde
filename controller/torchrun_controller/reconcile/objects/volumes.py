"""Bodies of claims, and the volumes and mounts of workers."""

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, object_at
from torchrun_api.kinds import CLAIMS
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.base import metadata
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, VolumeSource

LAUNCHER_DIR = "/torchrun"
PODINFO_DIR = "/torchrun-podinfo"
WORKSPACE_SOURCE_DIR = "/torchrun-workspace"
STATE_DIR = "/torchrun-state"
# In the workspace claim, made by the sync pod.
STATE_SUBPATH = "state"


def claim(job: TorchrunJob, wanted: VolumeSource, component: str) -> Apply:
    """A claim; a retained one has no owner, since garbage collection would delete it."""
    meta = metadata(job, wanted.name, component)
    if wanted.retain:
        del meta["ownerReferences"]
        object_at(meta, "labels")[names.RETAINED_LABEL] = job.metadata.name
    spec: JsonObject = {
        "accessModes": [wanted.access_mode],
        "resources": {"requests": {"storage": wanted.size}},
    }
    if wanted.storage_class_name is not None:
        spec["storageClassName"] = wanted.storage_class_name
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": spec,
    }
    return Apply(CLAIMS, body)


def keeps_state(run: ResolvedSpec) -> bool:
    """Whether workers have a directory that outlives their gang: on a workspace claim of ours."""
    claim = run.workspace
    if claim is None or claim.existing or claim.served:
        return False
    return claim.access_mode != "ReadOnlyMany"


def volumes(job: TorchrunJob, run: ResolvedSpec) -> list[JsonObject]:
    """v1 Volumes of a worker."""
    shm: JsonObject = {"medium": "Memory"}
    if run.shm_size is not None:
        shm["sizeLimit"] = run.shm_size
    made: list[JsonObject] = [
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
        made.append(_claim_volume("workspace", run.workspace.name, read_only=True))
    elif run.workspace is not None:
        if run.workspace.served:
            made.append(_token_volume())
        else:
            read_only = not keeps_state(run)
            made.append(_claim_volume("workspace-source", run.workspace.name, read_only=read_only))
        made.append({"name": "workspace", "emptyDir": {"sizeLimit": run.workspace.size}})
    if run.checkpoints is not None:
        made.append(_checkpoints_volume(run.checkpoints))
    for dataset in run.datasets:
        name = f"dataset-{dataset.name}"
        made.append(_claim_volume(name, dataset.claim_name, read_only=dataset.read_only))
    return made + [dict(volume) for volume in job.spec.volumes.additional_volumes]


def mounts(job: TorchrunJob, run: ResolvedSpec) -> list[JsonObject]:
    """v1 VolumeMounts of the training container."""
    made: list[JsonObject] = [
        {"name": "torchrun", "mountPath": LAUNCHER_DIR},
        {"name": "podinfo", "mountPath": PODINFO_DIR, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # the path that libraries know
    ]
    if run.workspace is not None and run.workspace.existing:
        made.append(_existing_mount(run.workspace))
    elif run.workspace is not None:
        source = "workspace-token" if run.workspace.served else "workspace-source"
        made.append({"name": source, "mountPath": WORKSPACE_SOURCE_DIR, "readOnly": True})
        made.append({"name": "workspace", "mountPath": run.workspace.mount_path})
    if keeps_state(run):
        # Of one volume: a claim that is two volumes of a pod is never mounted by older kubelets.
        made.append({"name": "workspace-source", "mountPath": STATE_DIR, "subPath": STATE_SUBPATH})
    if run.checkpoints is not None:
        made.append({"name": "checkpoints", "mountPath": run.checkpoints.mount_path})
    for dataset in run.datasets:
        mount: JsonObject = {"name": f"dataset-{dataset.name}", "mountPath": dataset.mount_path}
        if dataset.read_only:
            mount["readOnly"] = True
        made.append(mount)
    return made + [dict(mount) for mount in job.spec.volumes.additional_mounts]


def _existing_mount(workspace: VolumeSource) -> JsonObject:
    """A claim of the user's, in place: nothing is prepared and nothing is copied."""
    mount: JsonObject = {
        "name": "workspace",
        "mountPath": workspace.mount_path,
        "readOnly": True,
    }
    if workspace.sub_path:
        mount["subPath"] = workspace.sub_path
    return mount


def _token_volume() -> JsonObject:
    """A token that is good for the workspace alone; the kubelet renews it."""
    token: JsonObject = {
        "path": "token",
        "audience": names.WORKSPACE_AUDIENCE,
        "expirationSeconds": 3600,
    }
    return {
        "name": "workspace-token",
        "projected": {"sources": [{"serviceAccountToken": token}]},
    }


def _checkpoints_volume(wanted: VolumeSource) -> JsonObject:
    if not wanted.host_path:
        return _claim_volume("checkpoints", wanted.name, read_only=False)
    directory: JsonObject = {"path": wanted.host_path, "type": "DirectoryOrCreate"}
    return {"name": "checkpoints", "hostPath": directory}


def _claim_volume(name: str, claim_name: str, *, read_only: bool) -> JsonObject:
    source: JsonObject = {"claimName": claim_name}
    if read_only:
        source["readOnly"] = True
    return {"name": name, "persistentVolumeClaim": source}
