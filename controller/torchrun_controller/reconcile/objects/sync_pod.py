"""The sync pod: the only writer of a workspace's claim."""

from torchrun_api import contract, names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.kinds import PODS
from torchrun_api.queue import TorchrunQueue
from torchrun_api.variable import env_vars
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.base import (
    KEEP,
    NO_PROXY,
    NO_PROXY_LABEL,
    RESTRICTED_CONTAINER,
    RESTRICTED_POD,
    metadata,
    pull_secrets,
)
from torchrun_controller.reconcile.spec.resolve import VolumeSource
from torchrun_controller.reconcile.spec.scheduling import scheduling_of

SYNC_DIR = "/workspace"
BASE_DIR = "/torchrun-base"
FOR_ONE_NODE = ("ReadWriteOnce", "ReadWriteOncePod")
# Memory of a sync pod: git's index-pack holds objects and their bases in it.
UPLOAD_MEMORY = "512Mi"
FETCH_MEMORY = "1Gi"
# What an upload comes in by.
UPLOAD_PORT: JsonObject = {
    "ports": [{"name": "upload", "containerPort": names.SYNC_PORT, "protocol": "TCP"}],
    "readinessProbe": {
        "httpGet": {"path": "/readyz", "port": "upload"},
        "periodSeconds": 1,
    },
}


def sync_pod(
    job: TorchrunJob,
    wanted: VolumeSource,
    number: int,
    defaults: Defaults,
    commit: str = "",
    *,
    queue: TorchrunQueue | None,
    after: int | None = None,
    base: str = "",
    alone: bool = False,
) -> Apply:
    """Under the restricted Pod Security profile, without a token; it alone sees the Secret.

    `commit`, if any, is the only content that is taken. With `after` it stands by for any upload
    by the job's token, which becomes a revision later than that. `base` is a job whose workspace it
    may reuse. Without a `queue`, which may be gone, it has no place of its own choice. With `alone`
    no worker mounts the claim.
    """
    upload = workspace_source.upload_digest(job) if after is None else ""
    meta = metadata(job, names.sync_pod(job.metadata.name, number), names.SYNC)
    made_for = {
        names.WORKSPACE_SHA256: upload,
        names.UPLOAD_TOKEN_SHA256: workspace_source.upload_token(job),
        names.SOURCE: workspace_source.digest(job),
        names.WORKSPACE_BASE: base,
        names.COMMIT: commit,
        names.AFTER_REVISION: "" if after is None else str(after),
    }
    meta["labels"] = object_at(meta, "labels") | NO_PROXY_LABEL
    told: JsonObject = {name: value for name, value in made_for.items() if value}
    meta["annotations"] = KEEP | NO_PROXY | told
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": RESTRICTED_POD,
            "containers": [_container(job, defaults, commit, upload, after, base)],
            "volumes": [
                {"name": "workspace", "persistentVolumeClaim": {"claimName": wanted.name}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
                *workspace_source.secret_volumes(job),
                *_base_volumes(base),
            ],
            **_place(job, queue, with_workers=wanted.access_mode in FOR_ONE_NODE and not alone),
        },
    }
    return Apply(PODS, body)


def _place(job: TorchrunJob, queue: TorchrunQueue | None, *, with_workers: bool) -> JsonObject:
    """Where it may run, and how its image is pulled.

    A claim for one node is bound in the zone, or to the node, of its first pod: that goes where
    workers may go.
    """
    if queue is None:
        return {}
    scheduling = scheduling_of(job, queue)
    place: JsonObject = {
        "imagePullSecrets": pull_secrets(queue),
        "tolerations": [dict(each) for each in scheduling.tolerations],
    }
    if with_workers:
        place["nodeSelector"] = dict(scheduling.node_selector)
        place["affinity"] = scheduling.affinity
    return {name: value for name, value in place.items() if value}


def _base_volumes(base: str) -> list[JsonValue]:
    if not base:
        return []
    claim: JsonObject = {"claimName": names.workspace_claim(base), "readOnly": True}
    return [{"name": "base", "persistentVolumeClaim": claim}]


def _base_mounts(base: str) -> list[JsonValue]:
    return [{"name": "base", "mountPath": BASE_DIR, "readOnly": True}] if base else []


def _container(
    job: TorchrunJob, defaults: Defaults, commit: str, upload: str, after: int | None, base: str
) -> JsonObject:
    fetched = workspace_source.is_fetched(job)
    container: JsonObject = {
        "name": names.SYNC_CONTAINER,
        "image": workspace_source.source_of(job).image or defaults.runtime_image,
        "imagePullPolicy": defaults.runtime_image_pull_policy,
        "command": ["torchrun-sync"],
        "env": [
            *workspace_source.environment(job, commit),
            *env_vars(
                contract.SYNC_DIR.env_var(SYNC_DIR),
                contract.SYNC_PORT.env_var(names.SYNC_PORT),
                contract.SYNC_SHA256.env_var(upload or None),
                contract.SYNC_UPLOAD_TOKEN_SHA256.env_var(
                    workspace_source.upload_token(job) or None
                ),
                contract.SYNC_AFTER.env_var(after),
                contract.SYNC_BASE.env_var(BASE_DIR if base else None),
            ),
        ],
        "resources": {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"memory": FETCH_MEMORY if fetched else UPLOAD_MEMORY},
        },
        "securityContext": RESTRICTED_CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "workspace", "mountPath": SYNC_DIR},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the path that libraries know
            *workspace_source.secret_mounts(job),
            *_base_mounts(base),
        ],
    }
    return container if fetched else container | UPLOAD_PORT
