"""Labels, owner and security settings of all objects of a job."""

from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import TORCHRUN_JOBS

# uid and gid of the user in the runtime image.
RUNTIME_USER = 65532

# The restricted Pod Security profile, for pods and containers of the runtime image.
_USER: JsonObject = {"runAsNonRoot": True, "runAsUser": RUNTIME_USER, "runAsGroup": RUNTIME_USER}
_SECCOMP: JsonObject = {"seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED_USER: JsonObject = {**_USER, **_SECCOMP}
# For pods with volumes: the kubelet changes their group, unless they have this group already.
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

# Karpenter and cluster-autoscaler do not evict pods with these annotations to save a machine.
DO_NOT_EVICT: JsonObject = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
# The proxy of a service mesh (Istio, Linkerd) does not exit when the pod's container does.
NO_PROXY_LABEL: JsonObject = {"sidecar.istio.io/inject": "false"}
NO_PROXY: JsonObject = {"linkerd.io/inject": "disabled"}


def labels(job: TorchrunJob, component: str) -> JsonObject:
    """Return the labels of the job and its queue, and the recommended labels."""
    queue = job.spec.job_queue
    return {
        names.JOB_LABEL: job.metadata.name,
        names.JOB_UID_LABEL: job.metadata.uid,
        # The name of a queue may be longer than a label.
        **({names.QUEUE_LABEL: queue} if len(queue) <= names.MAX_LABEL else {}),
        names.NAME_LABEL: "torchrun",
        names.INSTANCE_LABEL: job.metadata.name,
        names.COMPONENT_LABEL: component,
        names.MANAGED_BY_LABEL: names.MANAGED_BY,
    }


def metadata(job: TorchrunJob, name: str, component: str) -> JsonObject:
    """Return the `metadata` of an object that is deleted with the job."""
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


def pull_secrets(queue: TorchrunQueue) -> JsonValue:
    """Return the image pull secrets of the queue as v1 LocalObjectReferences."""
    return [{"name": secret.name} for secret in queue.spec.image_pull_secrets]
