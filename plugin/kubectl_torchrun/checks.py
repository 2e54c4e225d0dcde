"""What doctor looks at, one function a subject: from answers of the API server to findings.

Each gives findings whatever it may see; what is forbidden or not there is a finding of its own.
"""

from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from kubectl_torchrun.api import Api, ApiError
from kubectl_torchrun.output import duration
from kubectl_torchrun.slices import QUEUES, Queue
from torchrun_api.json import JsonObject, JsonValue

Verdict = Literal["ok", "note", "warn", "fail"]
INSTALL = "an administrator installs it: kubectl apply -f manifests/crd, then the controller"
_LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/torchrun-controller"
_PODS = "/api/v1/namespaces/{}/pods"
_CONTROLLER = {"labelSelector": "app.kubernetes.io/name=torchrun-controller"}
_LEASE_SECONDS = 60.0  # a leader renews every few seconds
_SHARED = (
    *("nfs", "cephfs", "efs.csi", "filestore", "azurefile", "file.csi.azure", "gluster"),
    *("lustre", "weka", "vast", "beegfs", "juicefs", "longhorn", "portworx", "pxd", "quobyte"),
)
_SCHEDULERS = {  # API group: the scheduler's usual schedulerName
    "scheduling.run.ai": "kai-scheduler",
    "scheduling.volcano.sh": "volcano",
    "scheduling.x-k8s.io": "scheduler-plugins-scheduler (coscheduling)",
    "kueue.x-k8s.io": "Kueue (admission; any scheduler)",
}
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "habana.ai/gaudi")


class Finding(NamedTuple):
    """One line of doctor's report; `fix` says what to do, where there is something to do."""

    verdict: Verdict
    subject: str
    text: str
    fix: str = ""


Section = Coroutine[object, object, list[Finding]]


async def kinds(api: Api) -> list[Finding]:
    """Whether TorchrunJob and TorchrunQueue are served, and in which versions."""
    try:
        group = await api.read("/apis/torchrun.ai")
    except ApiError as error:
        if error.status != 404:
            return [_unseen("kinds", error)]
        return [Finding("fail", "kinds", "the cluster does not know TorchrunJobs", INSTALL)]
    versions = [str(_at(item, "version")) for item in _items(group, "versions")]
    if "v1alpha1" not in versions:
        text = f"served: {', '.join(versions)}; this plugin speaks v1alpha1"
        return [Finding("fail", "kinds", text, "install a plugin of the controller's version")]
    served = await api.read("/apis/torchrun.ai/v1alpha1")
    there = {str(_at(item, "name")) for item in _items(served, "resources")}
    missing = {"torchrunjobs", "torchrunqueues", "torchrunjobs/status"} - there
    if missing:
        return [Finding("fail", "kinds", f"not served: {', '.join(sorted(missing))}", INSTALL)]
    return [Finding("ok", "kinds", "TorchrunJob and TorchrunQueue, v1alpha1")]


async def controller(api: Api) -> list[Finding]:
    """Whether the controller runs and one of its replicas leads."""
    try:
        listed = await api.read("/apis/apps/v1/deployments", _CONTROLLER)
    except ApiError as error:
        return [_unseen("controller", error)]
    found = []
    for item in _items(listed, "items"):
        name, where = str(_at(item, "metadata", "name")), str(_at(item, "metadata", "namespace"))
        ready, wanted = _at(item, "status", "readyReplicas") or 0, _at(item, "spec", "replicas")
        images = [
            str(_at(c, "image")) for c in _items(item, "spec", "template", "spec", "containers")
        ]
        text = f"{where}/{name}: {ready} of {wanted} ready, image {', '.join(images)}"
        if ready:
            found.append(Finding("ok", "controller", text))
        else:
            fix = f"kubectl describe pods -n {where}; kubectl logs deploy/{name} -n {where}"
            found.append(Finding("fail", "controller", text + await _waits(api, where), fix))
        found.append(await _leader(api, where))
    return found or [Finding("fail", "controller", "no controller is installed", INSTALL)]


async def _waits(api: Api, where: str) -> str:
    """What the kubelet says of the first container of the controller that does not run."""
    try:
        pods = await api.read(_PODS.format(where), _CONTROLLER)
    except ApiError:
        return ""
    for pod in _items(pods, "items"):
        for container in _items(pod, "status", "containerStatuses"):
            if reason := _at(container, "state", "waiting", "reason"):
                message = _at(container, "state", "waiting", "message") or ""
                return f"; {reason}: {message}".rstrip(": ")
    return ""


async def _leader(api: Api, where: str) -> Finding:
    try:
        lease = await api.read(_LEASE.format(where))
    except ApiError as error:
        if error.status == 404:
            text = f"no lease in {where}: one replica alone, or none ever led"
            return Finding("note", "leader", text)
        return _unseen("leader", error)
    holder, renewed = _at(lease, "spec", "holderIdentity"), _at(lease, "spec", "renewTime")
    if not holder or not renewed:
        return Finding("warn", "leader", "no replica holds the lease", "see the controller's log")
    ago = (datetime.now(UTC) - datetime.fromisoformat(str(renewed))).total_seconds()
    text = f"{holder}, renewed {duration(max(int(ago), 0))} ago"
    if ago > _LEASE_SECONDS:
        return Finding(
            "fail", "leader", text, f"see: kubectl logs -n {where} deploy/torchrun-controller"
        )
    return Finding("ok", "leader", text)


async def storage(api: Api) -> list[Finding]:
    """Storage classes: whether there is a default, and one that several nodes can mount."""
    try:
        listed = await api.read("/apis/storage.k8s.io/v1/storageclasses")
    except ApiError as error:
        return [_unseen("storage", error)]
    found, shared, default = [], [], ""
    for item in _items(listed, "items"):
        name, by = str(_at(item, "metadata", "name")), str(_at(item, "provisioner"))
        if (
            _at(item, "metadata", "annotations", "storageclass.kubernetes.io/is-default-class")
            == "true"
        ):
            default = name
        if any(word in by.lower() for word in _SHARED):
            shared.append(name)
        found.append(f"{name} ({by})")
    fix = "name a class in the queue's spec.storage.workspace.storageClassName"
    if not found:
        return [Finding("fail", "storage", "no storage class", "install a provisioner of volumes")]
    if default:
        first = Finding("ok", "storage", f"default {default}; there are: {', '.join(found)}")
    else:
        first = Finding("warn", "storage", f"no default class; there are: {', '.join(found)}", fix)
    if shared:
        return [first, Finding("ok", "shared", f"for several nodes (RWX): {', '.join(shared)}")]
    text = "no class is known to serve several nodes at once (ReadWriteMany)"
    what = (
        "code reaches several nodes all the same; for shared checkpoints: NFS, CephFS or the like"
    )
    return [first, Finding("warn", "shared", text, what)]


async def gpus(api: Api, queues: Sequence[Queue]) -> list[Finding]:
    """GPUs of the nodes beside what the queues ask of one node."""
    asked = {queue.spec.node_resources.gpu_resource_name for queue in queues
             if queue.spec.node_resources.gpus}  # fmt: skip
    try:
        listed = await api.read("/api/v1/nodes")
    except ApiError as error:
        return [_unseen("nodes", error)]
    nodes = _items(listed, "items")
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    found = [Finding("ok" if nodes else "fail", "nodes", count,
                     "" if nodes else "the cluster has no nodes: nothing can run")]  # fmt: skip
    for resource in sorted({*asked, *_GPU_RESOURCES}):
        each = [int(str(_at(node, "status", "allocatable", resource) or 0)) for node in nodes]
        most = max(each, default=0)
        if most:
            with_some = sum(1 for number in each if number)
            text = f"{sum(each)} {resource} on {with_some} nodes, at most {most} on one"
            found.append(Finding("ok", "GPUs", text))
        for queue in queues:
            of = queue.spec.node_resources
            if of.gpu_resource_name == resource and of.gpus > most:
                name = queue.metadata.name
                text = f"queue {name} asks {of.gpus} {resource} of a node; {most} is the most"
                fix = "install the device plugin, add nodes, or lower nodeResources.gpus"
                found.append(Finding("fail", "GPUs", text, fix))
    if not any(finding.subject == "GPUs" for finding in found):
        found.append(Finding("note", "GPUs", "none; queues without GPUs run on CPUs (gloo)"))
    return found


async def schedulers(api: Api, queues: Sequence[Queue]) -> list[Finding]:
    """Gang schedulers that are installed, and those that the queues name."""
    groups = await api.read("/apis")
    there = {str(_at(group, "name")) for group in _items(groups, "groups")}
    known = [name for group, name in _SCHEDULERS.items() if group in there]
    text = ", ".join(known) or "only Kubernetes' own"
    found = [Finding("ok" if known else "note", "schedulers", text)]
    named = {queue.spec.scheduling.scheduler for queue in queues} - {None, "default-scheduler"}
    groups_of = {"kai-scheduler": "scheduling.run.ai", "volcano": "scheduling.volcano.sh"}
    for name in sorted(
        name for name in named if name and groups_of.get(name, "") not in {"", *there}
    ):
        text = f"queues name {name}, which is not installed: their pods will wait for ever"
        found.append(Finding("fail", "schedulers", text, f"install {name}, or name another"))
    return found


async def queues(api: Api) -> tuple[list[Finding], Sequence[Queue]]:
    """The queues of the namespace."""
    try:
        listed = (await api.list(QUEUES)).items
    except ApiError as error:
        if error.status == 404:
            return [], ()  # told by `kinds`
        return [_unseen("queues", error)], ()
    if not listed:
        fix = "make one, as in the README, or choose another namespace with -n"
        return [Finding("fail", "queues", f"none in the namespace {api.namespace}", fix)], ()
    found = [Finding("ok", "queues", ", ".join(sorted(queue.metadata.name for queue in listed)))]
    found += [
        Finding("warn", "queues", f"{queue.metadata.name} names no image",
                "set spec.image, or give --image with each job")
        for queue in listed if not queue.spec.image
    ]  # fmt: skip
    return found, listed


def _unseen(subject: str, error: ApiError) -> Finding:
    if error.status == 403:
        return Finding("note", subject, f"not yours to see ({error.message})")
    return Finding("warn", subject, f"the API server says: {error.message}")


def _at(value: JsonValue, *path: str) -> JsonValue:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _items(value: JsonValue, *path: str) -> list[JsonObject]:
    found = _at(value, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
