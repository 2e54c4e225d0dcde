"""What every object of a job has in common: labels, owner, security."""

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, JsonValue, objects_at
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_api.queue import TorchrunQueue

# uid and gid of the runtime image's own user.
RUNTIME_USER = 65532

# The restricted Pod Security profile, for pods and containers of the runtime image.
_USER: JsonObject = {"runAsNonRoot": True, "runAsUser": RUNTIME_USER, "runAsGroup": RUNTIME_USER}
_SECCOMP: JsonObject = {"seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED_USER: JsonObject = {**_USER, **_SECCOMP}
# With volumes: they are handed to this group, and large ones that are so already are left alone.
RESTRICTED_POD: JsonObject = {
    **_USER,
    "fsGroup": RUNTIME_USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    **_SECCOMP,
}
RESTRICTED_CONTAINER: JsonObject = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    **RESTRICTED_USER,
}

# The autoscalers' words for pods whose end costs more than a node that is half empty (Karpenter,
# cluster-autoscaler).
KEEP: JsonObject = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
# A mesh's proxy goes on beside a container that has ended, and so would the pod (Istio, Linkerd).
NO_PROXY_LABEL: JsonObject = {"sidecar.istio.io/inject": "false"}
NO_PROXY: JsonObject = {"linkerd.io/inject": "disabled"}


def labels(job: TorchrunJob, component: str) -> JsonObject:
    """The mission's own label and the recommended ones."""
    return {
        names.JOB_LABEL: job.metadata.name,
        names.NAME_LABEL: "torchrun",
        names.INSTANCE_LABEL: job.metadata.name,
        names.COMPONENT_LABEL: component,
        names.MANAGED_BY_LABEL: names.MANAGED_BY,
    }


def metadata(job: TorchrunJob, name: str, component: str) -> JsonObject:
    """`metadata` of an object that goes with the job."""
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": labels(job, component),
        "ownerReferences": [
            {
                "apiVersion": TORCHRUN_JOBS.api_version,
                "kind": TORCHRUN_JOBS.kind,
                "name": job.metadata.name,
                "uid": job.metadata.uid,
                "controller": True,
            }
        ],
    }


def container_of(pod: JsonObject, kind: str, name: str) -> JsonObject:
    """The container of this name, the very one; `kind` is "containers" or "initContainers"."""
    return next(each for each in objects_at(pod, kind) if each.get("name") == name)


def pull_secrets(queue: TorchrunQueue) -> JsonValue:
    """What images of the queue's jobs are pulled with, as v1 LocalObjectReferences."""
    return [{"name": secret.name} for secret in queue.spec.image_pull_secrets]
