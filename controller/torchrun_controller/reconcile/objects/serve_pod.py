"""The serve pod: a sync pod with a second container that serves the workspace to the workers."""

from typing import Literal

from torchrun_api import names, workspace_contract
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at
from torchrun_api.quantity import amount_of
from torchrun_api.variable import env_vars
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.base import RESTRICTED_CONTAINER
from torchrun_controller.reconcile.objects.sync_pod import SYNC_DIR
from torchrun_controller.reconcile.spec.resolve import VolumeSource

API_DIR = "/torchrun-api"
# The limit. Reading a revision of 200,000 files, next to the one before it, needs 360 MiB.
MEMORY = "512Mi"
# Storage of the workspace in a serve pod; "" for a PVC that the workers share.
Store = Literal["", "claim", "ephemeral"]


def serve_pod(
    job: TorchrunJob,
    base: Apply,
    source: VolumeSource,
    store: Store,
    number: int,
    defaults: Defaults,
) -> Apply:
    """Return the serve pod that a sync pod (`base`) becomes by a second container.

    The sync container exits, the serve container keeps running. It has a token of the pod's service
    account, because the API server shows the keys of the workers' tokens only to authenticated
    clients. The account needs no role.
    """
    meta, spec = object_at(base.body, "metadata"), object_at(base.body, "spec")
    annotations = object_at(meta, "annotations") | {names.DELIVERY: store}
    containers, volumes = objects_at(spec, "containers"), objects_at(spec, "volumes")
    if store == "ephemeral":
        workspace_volume: JsonObject = {"name": "workspace", "emptyDir": {"sizeLimit": source.size}}
        volumes = [workspace_volume, *volumes[1:]]
        limit = env_vars(workspace_contract.SYNC_MAX_BYTES.env_var(_max_bytes(source.size)))
        containers = [c | {"env": [*objects_at(c, "env"), *limit]} for c in containers]
    body: JsonObject = {
        **base.body,
        "metadata": meta
        | {"name": names.serve_pod(job.metadata.name, number), "annotations": annotations},
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
    return min(half, int(workspace_contract.SYNC_MAX_BYTES.default))


def _server(job: TorchrunJob, defaults: Defaults) -> JsonObject:
    return {
        "name": names.SERVE_CONTAINER,
        "image": workspace_source.source_of(job).image or defaults.runtime_image,
        "imagePullPolicy": defaults.runtime_image_pull_policy,
        "command": ["torchrun-serve"],
        "env": [
            *env_vars(
                workspace_contract.SERVE_DIR.env_var(SYNC_DIR),
                workspace_contract.SERVE_PORT.env_var(names.SERVE_PORT),
                workspace_contract.SERVE_NAMESPACE.env_var(job.metadata.namespace),
                workspace_contract.SERVE_JOB.env_var(job.metadata.name),
                workspace_contract.SERVE_API_DIR.env_var(API_DIR),
            )
        ],
        "ports": [{"name": "serve", "containerPort": names.SERVE_PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "serve"}, "periodSeconds": 1},
        "resources": {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"memory": MEMORY},
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
