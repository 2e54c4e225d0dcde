"""Whether jobs of the queues can start: queues, schedulers, machines, autoscalers, storage."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from kubectl_torchrun.doctor.controller import setting
from kubectl_torchrun.doctor.snapshot import (
    ClusterSnapshot,
    Finding,
    field_at,
    items_at,
    name_of,
    object_of,
    text_at,
    words_at,
)
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS, GangSchedulerApi
from torchrun_api.kinds.quantity import QuantityError, parse

_PAGE = "docs/environments.md"
_GPU_RESOURCES = (
    *("nvidia.com/gpu", "nvidia.com/gpu.shared", "amd.com/gpu"),
    *("gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi"),
)
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_INSTALL_SHARED = (
    "Install a provisioner with ReadWriteMany, such as csi-driver-nfs, CephFS or Longhorn; for"
    f" your cloud, see {_PAGE}"
)
# Volumes with a file system cannot be ReadWriteMany: disks and directories of one node, by the
# documentation of each driver. A prefix may come before the name, as in rook-ceph.rbd.csi.ceph.com.
_SINGLE_NODE = (
    *("ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com", "kubernetes.io/aws-ebs"),
    *("pd.csi.storage.gke.io", "kubernetes.io/gce-pd"),
    *("disk.csi.azure.com", "kubernetes.io/azure-disk"),
    *("rbd.csi.ceph.com", "cinder.csi.openstack.org", "dobs.csi.digitalocean.com"),
    *("csi.hetzner.cloud", "rancher.io/local-path", "kubernetes.io/no-provisioner"),
    *("topolvm.io", "openebs.io/local", "local.csi.openebs.io"),
)


def check_queues(snapshot: ClusterSnapshot) -> list[Finding]:
    """The queues of the namespace."""
    found = snapshot.find("queues")
    if found is None:
        return []  # reported by check_kinds
    queues = items_at(found, "items")
    if not queues:
        fix = "Create one as in the README, or select another namespace with -n"
        return [Finding("fail", "queues", f"None in namespace {snapshot.namespace}", fix)]
    findings = [Finding("ok", "queues", ", ".join(sorted(map(name_of, queues))))]
    findings += [
        Finding("warn", "queues", f"Queue {name_of(queue)} has no image",
                "Set spec.image, or use --image with each job")
        for queue in queues if not field_at(queue, "spec", "image")
    ]  # fmt: skip
    for name in (name_of(q) for q in queues if field_at(q, "metadata", "deletionTimestamp")):
        text = f"Queue {name} is being deleted: it accepts no new jobs and waits for running ones"
        fix = (
            "Wait; if no controller runs, remove the finalizer: "
            f'kubectl patch trq {name} --type=merge -p \'{{"metadata":{{"finalizers":[]}}}}\''
        )
        findings.append(Finding("warn", "queues", text, fix))
    return findings


def check_schedulers(snapshot: ClusterSnapshot) -> list[Finding]:
    """Gang schedulers that are installed, and those that the queues use."""
    served = snapshot.groups()
    installed = [
        _scheduler_text(scheduler)
        for scheduler in GANG_SCHEDULERS.values()
        if scheduler.api_group in served
    ]
    text = ", ".join(installed) or "Only the default scheduler of Kubernetes"
    findings = [Finding("ok" if installed else "note", "schedulers", text)]
    # Without an API group there is no sign of whether a scheduler is installed.
    absent = [s for s in GANG_SCHEDULERS.values() if s.api_group and s.api_group not in served]
    queues = snapshot.queues()
    requested = {text_at(queue, "spec", "scheduling", "scheduler") for queue in queues}
    for name in sorted(
        requested & {s.pod_scheduler for s in absent if s.pods_scheduled_by == "itself"}
    ):
        text = f"Scheduler {name} of a queue is not installed, so its pods stay Pending"
        fix = f"Install {name}, or change spec.scheduling.scheduler"
        findings.append(Finding("fail", "schedulers", text, fix))
    gangs = {text_at(queue, "spec", "scheduling", "gang") for queue in queues}
    for scheduler in absent:
        if scheduler.name in gangs:
            text = (
                f"{scheduler.title}, scheduling.gang of a queue, is not installed: its jobs wait"
                " (GangSchedulerMissing)"
            )
            fix = f"Install {scheduler.title}, or set scheduling.gang: none"
            findings.append(Finding("fail", "schedulers", text, fix))
    return findings


def _scheduler_text(scheduler: GangSchedulerApi) -> str:
    """The usual schedulerName of the pods; the title if pods of any scheduler are admitted."""
    name, pod_scheduler = scheduler.name, scheduler.pod_scheduler
    if not pod_scheduler:
        return f"{scheduler.title} (admission; any scheduler)"
    return pod_scheduler if name in pod_scheduler else f"{pod_scheduler} ({name})"


def check_machines(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether one machine has what each queue requests for a node of a job."""
    nodes = snapshot.items("nodes")
    autoscaler = find_autoscaler(snapshot)
    findings = [_count(nodes, autoscaler)]
    offered = {name for node in nodes for name in object_of(node, "status", "allocatable")}
    gpus = []
    for resource in sorted(filter(_is_gpu, offered)):
        counts = [int(_quantity(amount)) for amount in _amounts(nodes, resource)]
        if having := sum(1 for count in counts if count):
            where = "1 machine" if having == 1 else f"{having} machines"
            text = f"{sum(counts)} {resource} on {where}, at most {max(counts)} on one"
            findings.append(Finding("ok", "GPUs", text))
            gpus.append(resource)
    if not gpus:
        findings.append(Finding("note", "GPUs", "None; queues without GPUs run on CPUs (gloo)"))
    for queue in snapshot.queues() if nodes else ():
        for resource, requested in _requests(queue).items():
            largest = max(_amounts(nodes, resource), key=_quantity, default="0")
            if _quantity(requested) > _quantity(largest):
                text = (
                    f"Queue {name_of(queue)} requests {requested} {resource} for a node, but no"
                    f" machine has more than {largest}"
                )
                fix = _how_to_fit(resource, largest, gpus)
                findings.append(_too_small(snapshot, text, fix, autoscaler))
    return findings


def _is_gpu(resource: str) -> bool:
    """Whether a resource stands for a GPU or a part of one."""
    return resource in _GPU_RESOURCES or resource.startswith("nvidia.com/mig-")


def _requests(queue: JsonObject) -> dict[str, JsonValue]:
    """What a pod of the queue requests, by resource."""
    resources = object_of(queue, "spec", "nodeResources")
    requests = dict(object_of(resources, "extra"))
    gpu = text_at(resources, "gpuResourceName") or "nvidia.com/gpu"
    for name, field in ((gpu, "gpus"), ("cpu", "cpus"), ("memory", "memory")):
        if resources.get(field) is not None:
            requests[name] = resources[field]
    return requests


def _quantity(value: JsonValue) -> Fraction:
    try:
        return parse(value) if isinstance(value, int | str) else Fraction(0)
    except QuantityError:
        return Fraction(0)


def _amounts(nodes: Sequence[JsonObject], resource: str) -> list[str]:
    """What each machine offers of a resource, as its Node has it."""
    return [text_at(node, "status", "allocatable", resource) or "0" for node in nodes]


def _how_to_fit(resource: str, largest: str, gpus: Sequence[str]) -> str:
    """The fix for a queue that requests more than the largest machine has."""
    if _quantity(largest):
        return "Lower nodeResources of the queue, or add machines"
    if gpus and _is_gpu(resource):
        return f"Set nodeResources.gpuResourceName to what the machines have: {', '.join(gpus)}"
    return f"Install the driver and a device plugin ({_PAGE}), add machines, or change the queue"


def _too_small(snapshot: ClusterSnapshot, text: str, fix: str, autoscaler: str) -> Finding:
    """The finding for a queue that fits no machine, unless an autoscaler can add one."""
    if autoscaler:
        fix = "Check that one of its node groups has such machines"
        return Finding("note", "machines", f"{text} now. {autoscaler} can add machines", fix)
    unknown = any(map(snapshot.is_unreadable, ("groups", "cluster-autoscaler")))
    if unknown:
        text += ". Whether an autoscaler can add one is not known: no permission to read it"
    return Finding("warn" if unknown else "fail", "machines", text, fix)


def _count(nodes: Sequence[JsonObject], autoscaler: str) -> Finding:
    if not nodes and autoscaler:
        text = f"0 machines; {autoscaler} adds them when pods are pending"
        return Finding("note", "machines", text)
    if not nodes:
        return Finding("fail", "machines", "0 machines", "Add machines: no job can run")
    text = "1 machine" if len(nodes) == 1 else f"{len(nodes)} machines"
    unusable = [node for node in nodes if not _is_usable(node)]
    if not unusable:
        return Finding("ok", "machines", text)
    text += f"; {len(unusable)} not ready or cordoned, such as {name_of(unusable[0])}"
    fix = "kubectl get nodes; gangs start on the others only"
    return Finding("warn" if len(unusable) == len(nodes) else "note", "machines", text, fix)


def _is_usable(node: JsonObject) -> bool:
    conditions = items_at(node, "status", "conditions")
    ready = [text_at(each, "status") for each in conditions if text_at(each, "type") == "Ready"]
    return field_at(node, "spec", "unschedulable") is not True and set(ready) <= {"True"}


def check_autoscaler(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether an autoscaler adds machines, and whether admission lets it see the pods."""
    autoscaler = find_autoscaler(snapshot)
    if not autoscaler:
        snapshot.groups()  # raises why it cannot be read
        snapshot.find("cluster-autoscaler")
        return [Finding("ok", "autoscaler", "None found: jobs run on the machines that exist")]
    text = f"{autoscaler} adds machines for pending pods"
    queues = [
        name_of(queue)
        for queue in snapshot.queues()
        if {"quota", "weight", "cohort"} & object_of(queue, "spec").keys()
    ]
    unread = snapshot.is_unreadable("deployments")
    controllers = [] if unread else snapshot.items("deployments")
    if not queues or any(setting(each, "admit-by-nodes") == "false" for each in controllers):
        return [Finding("ok", "autoscaler", text)]
    text += (
        f", but jobs of {', '.join(queues)} get no pods before the machines have room for them, so"
        " it adds none (WaitingForNodes, ExceedsNodes)"
    )
    fix = "Run the controller with --admit-by-nodes=false (chart: settings.admitByNodes)"
    if unread:
        text += ". Its setting --admit-by-nodes could not be read"
    return [Finding("note" if unread else "warn", "autoscaler", text, fix)]


def find_autoscaler(snapshot: ClusterSnapshot) -> str:
    """The name of what adds machines; "" if nothing readable says so."""
    if not snapshot.is_unreadable("groups") and "karpenter.sh" in snapshot.groups():
        return "Karpenter"
    name = "cluster-autoscaler"
    return name if not snapshot.is_unreadable(name) and snapshot.find(name) else ""


def check_storage(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether the classes and PVCs of the queues exist, and several nodes can mount them."""
    classes = {name_of(item): item for item in snapshot.items("storageclasses")}
    if not classes:
        return [Finding("fail", "storage", "The cluster has no storage class", _INSTALL_SHARED)]
    default = next((name for name, item in classes.items() if _is_default(item)), "")
    listed = ", ".join(f"{name} ({text_at(c, 'provisioner')})" for name, c in classes.items())
    if default:
        findings = [Finding("ok", "storage", f"Default {default}; classes: {listed}")]
    else:
        fix = "Set spec.storage.workspace.storageClassName in the queue"
        findings = [Finding("warn", "storage", f"No default class; classes: {listed}", fix)]
    if all(map(_is_single_node, classes.values())):
        text = (
            "No storage class is known to support ReadWriteMany. Code reaches all nodes without"
            " it; checkpoints of several nodes do not"
        )
        findings.append(Finding("warn", "storage", text, _INSTALL_SHARED))
    for queue in snapshot.queues():
        findings += _check_classes(queue, classes, default)
    return findings


def _is_default(storage_class: JsonObject) -> bool:
    return text_at(storage_class, "metadata", "annotations", _DEFAULT_CLASS) == "true"


def _is_single_node(storage_class: JsonObject) -> bool:
    provisioner = text_at(storage_class, "provisioner")
    return any(provisioner == n or provisioner.endswith(f".{n}") for n in _SINGLE_NODE)


def _check_classes(
    queue: JsonObject, classes: Mapping[str, JsonObject], default: str
) -> Iterator[Finding]:
    name = name_of(queue)
    for use in ("workspace", "checkpoints"):
        volume = object_of(queue, "spec", "storage", use)
        chosen = text_at(volume, "storageClassName")
        known = classes.get(chosen or default)
        if chosen and known is None:
            text = (
                f"Queue {name} uses storage class {chosen} for its {use}, which does not exist."
                " The PVC binds only to a volume that an administrator creates"
            )
            fix = f"Set spec.storage.{use}.storageClassName to one of: {', '.join(classes)}"
            yield Finding("warn", "storage", text, fix)
        elif use == "checkpoints" and known and _is_shared(volume) and _is_single_node(known):
            text = (
                f"Queue {name} has its checkpoints in class {name_of(known)}"
                f" ({text_at(known, 'provisioner')}), which does not support ReadWriteMany by"
                " itself: jobs of several nodes can wait (ClaimPending)"
            )
            fix = "Set spec.storage.checkpoints.storageClassName to a class with ReadWriteMany"
            yield Finding("warn", "storage", text, fix)


def _is_shared(volume: JsonObject) -> bool:
    """Whether jobs of several nodes create a PVC from this template and share it."""
    existing = volume.get("claimName") or volume.get("hostPath")
    mode = volume.get("accessMode") or "ReadWriteMany"
    return (
        bool(volume and volume.get("enabled") is not False)
        and not existing
        and mode == "ReadWriteMany"
    )


def check_claims(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether the PVCs that the queues name exist, and several nodes can mount them."""
    claims = {name_of(item): item for item in snapshot.items("claims")}
    findings = []
    for queue in snapshot.queues():
        for use, claim in _claims_of(queue):
            if claim not in claims:
                text = f"PVC {claim}, {use} of queue {name_of(queue)}, does not exist: jobs wait"
                fix = f"Create it in namespace {snapshot.namespace}, or change claimName"
                findings.append(Finding("warn", "claims", text, fix))
                continue
            modes = words_at(claims[claim], "spec", "accessModes")
            if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
                text = (
                    f"PVC {claim}, {use} of queue {name_of(queue)}, has the access mode"
                    f" {', '.join(modes)}: pods on several machines cannot mount it"
                )
                fix = "Use a PVC with ReadWriteMany for jobs of several nodes"
                findings.append(Finding("warn", "claims", text, fix))
    return findings


def _claims_of(queue: JsonObject) -> Iterable[tuple[str, str]]:
    """The use and the name of each PVC that the queue names."""
    storage = object_of(queue, "spec", "storage")
    if checkpoints := text_at(storage, "checkpoints", "claimName"):
        yield "checkpoints", checkpoints
    for dataset in items_at(storage, "datasets"):
        yield f"dataset {text_at(dataset, 'name')}", text_at(dataset, "claimName")
