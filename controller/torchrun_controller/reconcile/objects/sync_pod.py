"""The pods that fill and serve a workspace.

The sync pod is the only writer of a workspace PVC. The serve pod is a sync pod with a second
container that serves the workspace to the workers.
"""

from typing import Literal

from msgspec import Struct

from torchrun_api import names
from torchrun_api.contract import sync
from torchrun_api.contract.variable import env_vars
from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.quantity import amount_of
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import PODS
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.base import (
    DO_NOT_EVICT,
    NO_PROXY,
    NO_PROXY_LABEL,
    RESTRICTED_CONTAINER,
    RESTRICTED_POD,
    metadata,
    pull_secrets,
)
from torchrun_controller.reconcile.spec.resolve import VolumeSource, scheduling_of

SYNC_DIR = "/workspace"
BASE_DIR = "/torchrun-base"
# For the machine of a worker: its taints may be those that Kubernetes lets pods with GPUs tolerate.
ANY_NODE: JsonObject = {"operator": "Exists", "effect": "NoSchedule"}
# The limit. An upload of 200,000 files needs half of it. git's index-pack has
# objects and their bases in memory.
MEMORY = "1Gi"
# For uploads.
UPLOAD_PORT: JsonObject = {
    "ports": [{"name": "upload", "containerPort": names.SYNC_PORT, "protocol": "TCP"}],
    "readinessProbe": {
        "httpGet": {"path": "/readyz", "port": "upload"},
        "periodSeconds": 1,
    },
}
API_DIR = "/torchrun-api"
# The limit. Reading a revision of 200,000 files, next to the one before it, needs 360 MiB.
SERVE_MEMORY = "512Mi"
# Storage of the workspace in a serve pod; "" for a PVC that the workers share.
Store = Literal["", "claim", "ephemeral"]


class SyncRequest(Struct, frozen=True, kw_only=True):
    """What one sync or serve pod has to do, and where.

    `store` is the storage of a serve pod, "" for a sync pod. The pod accepts only the content
    `commit`, if that is set. A pod that `stands_by` accepts any upload with the job's token. `base`
    is a job whose workspace a sync pod may reuse. The revision of the new workspace is later than
    `last_revision`. With `with_workers` the pod runs where workers may run, or on `node`, if that
    is set. `claim_uid` is that of a PVC that exists.
    """

    source: VolumeSource
    number: int
    store: Store = ""
    commit: str = ""
    stands_by: bool = False
    base: str = ""
    last_revision: int = 0
    with_workers: bool = False
    node: str = ""
    claim_uid: str = ""


def sync_pod(
    job: TorchrunJob, queue: TorchrunQueue | None, request: SyncRequest, defaults: Defaults
) -> Apply:
    """Return a sync pod, with the restricted Pod Security profile and without a token.

    Only this pod mounts the Secret of the source. `queue` is None if it is gone.
    """
    upload = "" if request.stands_by else workspace_source.upload_digest(job)
    meta = metadata(job, names.sync_pod(job.metadata.name, request.number), names.SYNC)
    inputs = {
        names.WORKSPACE_SHA256: upload,
        names.UPLOAD_TOKEN_SHA256: workspace_source.upload_token(job),
        names.SOURCE: workspace_source.digest(job),
        names.WORKSPACE_BASE: request.base,
        names.COMMIT: request.commit,
        names.AFTER_REVISION: str(request.last_revision) if request.stands_by else "",
        names.CLAIM_NODE: request.node,
        names.CLAIM_UID: request.claim_uid,
    }
    meta["labels"] = object_at(meta, "labels") | NO_PROXY_LABEL
    annotations: JsonObject = {name: value for name, value in inputs.items() if value}
    meta["annotations"] = DO_NOT_EVICT | NO_PROXY | annotations
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": RESTRICTED_POD,
            "containers": [_container(job, request, upload, defaults)],
            "volumes": [
                {"name": "workspace", "persistentVolumeClaim": {"claimName": request.source.name}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
                *workspace_source.secret_volumes(job),
                *_base_volumes(request.base),
            ],
            **_placement(job, queue, request),
        },
    }
    return Apply(PODS, body)


def _placement(job: TorchrunJob, queue: TorchrunQueue | None, request: SyncRequest) -> JsonObject:
    """Return the fields for machine placement and image pulls.

    A PVC for one machine is bound in the zone, or to the machine, of its first pod. So that pod
    must run where workers may run, and a later one on the `node` of a worker, whatever that machine
    is for.
    """
    node, with_workers = request.node, request.with_workers
    placement: JsonObject = {}
    tolerations: list[JsonValue] = []
    if queue is not None:
        scheduling = scheduling_of(job, queue)
        placement["imagePullSecrets"] = pull_secrets(queue)
        tolerations += [dict(toleration) for toleration in scheduling.tolerations]
        if with_workers and not node:
            placement["nodeSelector"] = dict(scheduling.node_selector)
            placement["affinity"] = scheduling.affinity
    if node:
        placement["affinity"] = _node_affinity(node)
        tolerations += [ANY_NODE] if with_workers else []
    placement["tolerations"] = tolerations
    return {name: value for name, value in placement.items() if value}


def _node_affinity(node: str) -> JsonObject:
    """Return the v1 Affinity to one machine."""
    term: JsonObject = {
        "matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]
    }
    required: JsonObject = {"nodeSelectorTerms": [term]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _base_volumes(base: str) -> list[JsonValue]:
    if not base:
        return []
    claim: JsonObject = {"claimName": names.workspace_claim(base), "readOnly": True}
    return [{"name": "base", "persistentVolumeClaim": claim}]


def _base_mounts(base: str) -> list[JsonValue]:
    return [{"name": "base", "mountPath": BASE_DIR, "readOnly": True}] if base else []


def _container(
    job: TorchrunJob, request: SyncRequest, upload: str, defaults: Defaults
) -> JsonObject:
    is_fetched = workspace_source.is_fetched(job)
    container: JsonObject = {
        "name": names.SYNC_CONTAINER,
        "image": workspace_source.source_of(job).image or defaults.runtime_image,
        "imagePullPolicy": defaults.runtime_image_pull_policy,
        "command": ["torchrun-sync"],
        "env": [
            *workspace_source.environment(job, request.commit),
            *env_vars(
                sync.SYNC_DIR.env_var(SYNC_DIR),
                sync.SYNC_PORT.env_var(names.SYNC_PORT),
                sync.SYNC_JOB_UID.env_var(job.metadata.uid),
                sync.SYNC_SHA256.env_var(upload or None),
                sync.SYNC_UPLOAD_TOKEN_SHA256.env_var(workspace_source.upload_token(job) or None),
                sync.SYNC_AFTER.env_var(request.last_revision if request.stands_by else None),
                sync.SYNC_LAST_REVISION.env_var(request.last_revision or None),
                sync.SYNC_BASE.env_var(BASE_DIR if request.base else None),
            ),
        ],
        "resources": {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"memory": MEMORY},
        },
        "securityContext": RESTRICTED_CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "workspace", "mountPath": SYNC_DIR},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # libraries expect it
            *workspace_source.secret_mounts(job),
            *_base_mounts(request.base),
        ],
    }
    return container if is_fetched else container | UPLOAD_PORT


def serve_pod(
    job: TorchrunJob, queue: TorchrunQueue | None, request: SyncRequest, defaults: Defaults
) -> Apply:
    """Return a serve pod: a sync pod with a second container.

    The sync container exits, the serve container keeps running. It has a token of the pod's service
    account, because the API server shows the keys of the workers' tokens only to authenticated
    clients. The account needs no role.
    """
    base, size = sync_pod(job, queue, request, defaults), request.source.size
    meta, spec = object_at(base.body, "metadata"), object_at(base.body, "spec")
    annotations = object_at(meta, "annotations") | {names.DELIVERY: request.store}
    containers, volumes = objects_at(spec, "containers"), objects_at(spec, "volumes")
    if request.store == "ephemeral":
        workspace_volume: JsonObject = {"name": "workspace", "emptyDir": {"sizeLimit": size}}
        volumes = [workspace_volume, *volumes[1:]]
        limit = env_vars(sync.SYNC_MAX_BYTES.env_var(_max_bytes(size)))
        containers = [c | {"env": [*objects_at(c, "env"), *limit]} for c in containers]
    body: JsonObject = {
        **base.body,
        "metadata": meta
        | {"name": names.serve_pod(job.metadata.name, request.number), "annotations": annotations},
        "spec": spec
        | {
            "restartPolicy": "OnFailure",
            "containers": [*containers, _server(job, defaults)],
            "volumes": [*volumes, _api_volume()],
        },
    }
    return Apply(base.kind, body)


def _max_bytes(size: str) -> int:
    """Return the largest archive for a volume that holds it together with its files.

    The kubelet evicts a pod whose emptyDir is larger than its limit.
    """
    half = max(1, int(amount_of(size)) // 2)
    return min(half, int(sync.SYNC_MAX_BYTES.default))


def _server(job: TorchrunJob, defaults: Defaults) -> JsonObject:
    return {
        "name": names.SERVE_CONTAINER,
        "image": workspace_source.source_of(job).image or defaults.runtime_image,
        "imagePullPolicy": defaults.runtime_image_pull_policy,
        "command": ["torchrun-serve"],
        "env": [
            *env_vars(
                sync.SERVE_DIR.env_var(SYNC_DIR),
                sync.SERVE_PORT.env_var(names.SERVE_PORT),
                sync.SERVE_NAMESPACE.env_var(job.metadata.namespace),
                sync.SERVE_JOB.env_var(job.metadata.name),
                sync.SERVE_API_DIR.env_var(API_DIR),
            )
        ],
        "ports": [{"name": "serve", "containerPort": names.SERVE_PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "serve"}, "periodSeconds": 1},
        "resources": {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"memory": SERVE_MEMORY},
        },
        "securityContext": RESTRICTED_CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "workspace", "mountPath": SYNC_DIR, "readOnly": True},
            {"name": "api", "mountPath": API_DIR, "readOnly": True},
        ],
    }


def _api_volume() -> JsonObject:
    """Return the v1 Volume with token and CA of the API server, for the serve container only."""
    authority: JsonValue = {
        "name": "kube-root-ca.crt",
        "items": [{"key": "ca.crt", "path": "ca.crt"}],
    }
    return {
        "name": "api",
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
                {"configMap": authority},
            ]
        },
    }
