"""Doctor's checks, one function for each subject: from responses of the API server to findings.

A subject that is forbidden or missing is a finding too.
"""

from collections.abc import Coroutine, Sequence
from typing import Literal, NamedTuple

from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.slices import QUEUES, Queue
from torchrun_api.json import JsonObject, JsonValue

Severity = Literal["ok", "note", "warn", "fail"]
INSTALL = "an administrator installs it: kubectl apply -f manifests/crd, then the controller"
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

    verdict: Severity  # the name in the output of -o
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
            return [unseen("kinds", error)]
        return [Finding("fail", "kinds", "the cluster does not know TorchrunJobs", INSTALL)]
    versions = [str(field_at(item, "version")) for item in items_at(group, "versions")]
    if "v1alpha1" not in versions:
        text = f"served: {', '.join(versions)}; this plugin speaks v1alpha1"
        return [Finding("fail", "kinds", text, "install a plugin of the controller's version")]
    served = await api.read("/apis/torchrun.ai/v1alpha1")
    there = {str(field_at(item, "name")) for item in items_at(served, "resources")}
    missing = {"torchrunjobs", "torchrunqueues", "torchrunjobs/status"} - there
    if missing:
        return [Finding("fail", "kinds", f"not served: {', '.join(sorted(missing))}", INSTALL)]
    return [Finding("ok", "kinds", "TorchrunJob and TorchrunQueue, v1alpha1")]


async def storage(api: Api) -> list[Finding]:
    """Storage classes: whether there is a default, and one that several nodes can mount."""
    try:
        listed = await api.read("/apis/storage.k8s.io/v1/storageclasses")
    except ApiError as error:
        return [unseen("storage", error)]
    names, shared, default = [], [], ""
    for item in items_at(listed, "items"):
        name, by = str(field_at(item, "metadata", "name")), str(field_at(item, "provisioner"))
        if (
            field_at(item, "metadata", "annotations", "storageclass.kubernetes.io/is-default-class")
            == "true"
        ):
            default = name
        if any(word in by.lower() for word in _SHARED):
            shared.append(name)
        names.append(f"{name} ({by})")
    fix = "name a class in the queue's spec.storage.workspace.storageClassName"
    if not names:
        return [Finding("fail", "storage", "no storage class", "install a provisioner of volumes")]
    if default:
        first = Finding("ok", "storage", f"default {default}; there are: {', '.join(names)}")
    else:
        first = Finding("warn", "storage", f"no default class; there are: {', '.join(names)}", fix)
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
        return [unseen("nodes", error)]
    nodes = items_at(listed, "items")
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    findings = [Finding("ok" if nodes else "fail", "nodes", count,
                     "" if nodes else "the cluster has no nodes: nothing can run")]  # fmt: skip
    for resource in sorted({*asked, *_GPU_RESOURCES}):
        each = [int(str(field_at(node, "status", "allocatable", resource) or 0)) for node in nodes]
        most = max(each, default=0)
        if most:
            with_some = sum(1 for number in each if number)
            text = f"{sum(each)} {resource} on {with_some} nodes, at most {most} on one"
            findings.append(Finding("ok", "GPUs", text))
        for queue in queues:
            of = queue.spec.node_resources
            if of.gpu_resource_name == resource and of.gpus > most:
                name = queue.metadata.name
                text = f"queue {name} asks {of.gpus} {resource} of a node; {most} is the most"
                fix = "install the device plugin, add nodes, or lower nodeResources.gpus"
                findings.append(Finding("fail", "GPUs", text, fix))
    if not any(finding.subject == "GPUs" for finding in findings):
        findings.append(Finding("note", "GPUs", "none; queues without GPUs run on CPUs (gloo)"))
    return findings


async def schedulers(api: Api, queues: Sequence[Queue]) -> list[Finding]:
    """Gang schedulers that are installed, and those that the queues name."""
    groups = await api.read("/apis")
    there = {str(field_at(group, "name")) for group in items_at(groups, "groups")}
    known = [name for group, name in _SCHEDULERS.items() if group in there]
    text = ", ".join(known) or "only Kubernetes' own"
    findings = [Finding("ok" if known else "note", "schedulers", text)]
    named = {queue.spec.scheduling.scheduler for queue in queues} - {None, "default-scheduler"}
    groups_of = {"kai-scheduler": "scheduling.run.ai", "volcano": "scheduling.volcano.sh"}
    for name in sorted(
        name for name in named if name and groups_of.get(name, "") not in {"", *there}
    ):
        text = f"queues name {name}, which is not installed: their pods will wait for ever"
        findings.append(Finding("fail", "schedulers", text, f"install {name}, or name another"))
    return findings


async def queues(api: Api) -> tuple[list[Finding], Sequence[Queue]]:
    """The queues of the namespace."""
    try:
        listed = (await api.list(QUEUES)).items
    except ApiError as error:
        if error.status == 404:
            return [], ()  # reported by `kinds`
        return [unseen("queues", error)], ()
    if not listed:
        fix = "make one, as in the README, or choose another namespace with -n"
        return [Finding("fail", "queues", f"none in the namespace {api.namespace}", fix)], ()
    findings = [Finding("ok", "queues", ", ".join(sorted(queue.metadata.name for queue in listed)))]
    findings += [
        Finding("warn", "queues", f"{queue.metadata.name} names no image",
                "set spec.image, or give --image with each job")
        for queue in listed if not queue.spec.image
    ]  # fmt: skip
    for name in (q.metadata.name for q in listed if q.metadata.deletion_timestamp):
        text = f"{name} is being deleted: it takes no new jobs, and goes after those that run"
        fix = (
            "wait; where no controller is left to let it go: "
            f'kubectl patch trq {name} --type=merge -p \'{{"metadata":{{"finalizers":[]}}}}\''
        )
        findings.append(Finding("warn", "queues", text, fix))
    return findings, listed


def unseen(subject: str, error: ApiError) -> Finding:
    """The finding for a subject that the API server does not show."""
    if error.status == 403:
        return Finding("note", subject, f"not yours to see ({error.message})")
    return Finding("warn", subject, f"the API server says: {error.message}")


def field_at(value: JsonValue, *path: str) -> JsonValue:
    """The field at a path, None where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def items_at(value: JsonValue, *path: str) -> list[JsonObject]:
    """The objects of the list at a path."""
    items = field_at(value, *path)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
