"""Checks of doctor, one function for each subject: from responses of the API server to findings.

A subject that is forbidden or missing is a finding, too.
"""

from collections.abc import Coroutine, Sequence
from typing import Literal, NamedTuple

from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.slices import QUEUES, Queue
from torchrun_api.gang_schedulers import GANG_SCHEDULERS, GangSchedulerApi
from torchrun_api.json import JsonObject, JsonValue

Severity = Literal["ok", "note", "warn", "fail"]
INSTALL = "Ask an administrator to install it: kubectl apply -f manifests/crd, then the controller"
_SHARED = (
    *("nfs", "cephfs", "efs.csi", "filestore", "azurefile", "file.csi.azure", "gluster"),
    *("lustre", "weka", "vast", "beegfs", "juicefs", "longhorn", "portworx", "pxd", "quobyte"),
)
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "habana.ai/gaudi")


class Finding(NamedTuple):
    """One line of the report of doctor; `fix` is the next step, if one is needed."""

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
            return [unreadable_finding("kinds", error)]
        return [Finding("fail", "kinds", "The TorchrunJob CRD is not installed", INSTALL)]
    versions = [str(field_at(item, "version")) for item in items_at(group, "versions")]
    if "v1alpha1" not in versions:
        text = f"The cluster serves {', '.join(versions)}; this plugin needs v1alpha1"
        return [Finding("fail", "kinds", text, "Install the plugin version of the controller")]
    group_version = await api.read("/apis/torchrun.ai/v1alpha1")
    served = {str(field_at(item, "name")) for item in items_at(group_version, "resources")}
    missing = {"torchrunjobs", "torchrunqueues", "torchrunjobs/status"} - served
    if missing:
        text = f"The cluster does not serve {', '.join(sorted(missing))}"
        return [Finding("fail", "kinds", text, INSTALL)]
    return [Finding("ok", "kinds", "TorchrunJob and TorchrunQueue, v1alpha1")]


async def storage(api: Api) -> list[Finding]:
    """Storage classes: whether one is the default, and whether one supports ReadWriteMany."""
    try:
        listed = await api.read("/apis/storage.k8s.io/v1/storageclasses")
    except ApiError as error:
        return [unreadable_finding("storage", error)]
    names, shared, default = [], [], ""
    for item in items_at(listed, "items"):
        name = str(field_at(item, "metadata", "name"))
        provisioner = str(field_at(item, "provisioner"))
        if (
            field_at(item, "metadata", "annotations", "storageclass.kubernetes.io/is-default-class")
            == "true"
        ):
            default = name
        if any(word in provisioner.lower() for word in _SHARED):
            shared.append(name)
        names.append(f"{name} ({provisioner})")
    fix = "Set spec.storage.workspace.storageClassName in the queue"
    if not names:
        text = "The cluster has no storage class"
        return [Finding("fail", "storage", text, "Install a volume provisioner")]
    if default:
        first = Finding("ok", "storage", f"Default {default}; classes: {', '.join(names)}")
    else:
        first = Finding("warn", "storage", f"No default class; classes: {', '.join(names)}", fix)
    if shared:
        return [first, Finding("ok", "shared", f"ReadWriteMany: {', '.join(shared)}")]
    text = "No storage class is known to support ReadWriteMany"
    fix = "Code reaches all nodes without it; shared checkpoints need NFS, CephFS or similar"
    return [first, Finding("warn", "shared", text, fix)]


async def gpus(api: Api, queues: Sequence[Queue]) -> list[Finding]:
    """GPUs of the nodes, compared with what the queues request for one node."""
    requested = {queue.spec.node_resources.gpu_resource_name for queue in queues
                 if queue.spec.node_resources.gpus}  # fmt: skip
    try:
        listed = await api.read("/api/v1/nodes")
    except ApiError as error:
        return [unreadable_finding("nodes", error)]
    nodes = items_at(listed, "items")
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    findings = [Finding("ok" if nodes else "fail", "nodes", count,
                     "" if nodes else "Add nodes: no job can run")]  # fmt: skip
    for resource in sorted({*requested, *_GPU_RESOURCES}):
        counts = [
            int(str(field_at(node, "status", "allocatable", resource) or 0)) for node in nodes
        ]
        largest = max(counts, default=0)
        if largest:
            gpu_nodes = sum(1 for count in counts if count)
            text = f"{sum(counts)} {resource} on {gpu_nodes} nodes, at most {largest} on one"
            findings.append(Finding("ok", "GPUs", text))
        for queue in queues:
            request = queue.spec.node_resources
            if request.gpu_resource_name == resource and request.gpus > largest:
                text = (
                    f"Queue {queue.metadata.name} requests {request.gpus} {resource} for a node,"
                    f" but no node has more than {largest}"
                )
                fix = "Install the device plugin, add nodes, or lower nodeResources.gpus"
                findings.append(Finding("fail", "GPUs", text, fix))
    if not any(finding.subject == "GPUs" for finding in findings):
        findings.append(Finding("note", "GPUs", "None; queues without GPUs run on CPUs (gloo)"))
    return findings


async def schedulers(api: Api, queues: Sequence[Queue]) -> list[Finding]:
    """Gang schedulers that are installed, and those that the queues use."""
    groups = await api.read("/apis")
    served = {str(field_at(group, "name")) for group in items_at(groups, "groups")}
    installed = [
        scheduler_text(scheduler)
        for scheduler in GANG_SCHEDULERS.values()
        if scheduler.api_group in served
    ]
    text = ", ".join(installed) or "Only the default scheduler of Kubernetes"
    findings = [Finding("ok" if installed else "note", "schedulers", text)]
    requested = {queue.spec.scheduling.scheduler for queue in queues} - {None, "default-scheduler"}
    missing = {
        scheduler.pod_scheduler
        for scheduler in GANG_SCHEDULERS.values()
        if scheduler.pods_scheduled_by == "itself"
        # Without an API group there is no sign of whether it is installed.
        and scheduler.api_group
        and scheduler.api_group not in served
    }
    for name in sorted(name for name in requested if name in missing):
        text = f"Scheduler {name} of a queue is not installed, so its pods stay Pending"
        fix = f"Install {name}, or change spec.scheduling.scheduler"
        findings.append(Finding("fail", "schedulers", text, fix))
    return findings


def scheduler_text(scheduler: GangSchedulerApi) -> str:
    """The usual schedulerName of the pods; the title if pods of any scheduler are admitted."""
    name, pod_scheduler = scheduler.name, scheduler.pod_scheduler
    if not pod_scheduler:
        return f"{scheduler.title} (admission; any scheduler)"
    return pod_scheduler if name in pod_scheduler else f"{pod_scheduler} ({name})"


async def queues(api: Api) -> tuple[list[Finding], Sequence[Queue]]:
    """The queues of the namespace."""
    try:
        listed = (await api.list(QUEUES)).items
    except ApiError as error:
        if error.status == 404:
            return [], ()  # reported by `kinds`
        return [unreadable_finding("queues", error)], ()
    if not listed:
        fix = "Create one as in the README, or select another namespace with -n"
        return [Finding("fail", "queues", f"None in namespace {api.namespace}", fix)], ()
    findings = [Finding("ok", "queues", ", ".join(sorted(queue.metadata.name for queue in listed)))]
    findings += [
        Finding("warn", "queues", f"Queue {queue.metadata.name} has no image",
                "Set spec.image, or use --image with each job")
        for queue in listed if not queue.spec.image
    ]  # fmt: skip
    for name in (q.metadata.name for q in listed if q.metadata.deletion_timestamp):
        text = f"Queue {name} is being deleted: it accepts no new jobs and waits for running ones"
        fix = (
            "Wait; if no controller runs, remove the finalizer: "
            f'kubectl patch trq {name} --type=merge -p \'{{"metadata":{{"finalizers":[]}}}}\''
        )
        findings.append(Finding("warn", "queues", text, fix))
    return findings, listed


def unreadable_finding(subject: str, error: ApiError) -> Finding:
    """The finding for a subject that cannot be read."""
    if error.status == 403:
        return Finding("note", subject, f"No permission to read it: {error.message}")
    return Finding("warn", subject, f"The API server returned an error: {error.message}")


def field_at(value: JsonValue, *path: str) -> JsonValue:
    """The field at a path, None where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def items_at(value: JsonValue, *path: str) -> list[JsonObject]:
    """The objects of the list at a path."""
    items = field_at(value, *path)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
