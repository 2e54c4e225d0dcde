"""Nodes: their GPUs, what the queues request of them, taints, and autoscalers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kubectl_torchrun.doctor.environment import GKE, environment_of
from kubectl_torchrun.doctor.findings import (
    Finding,
    field_at,
    items_at,
    name_of,
    object_of,
    text_at,
    words_at,
)
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from torchrun_api.json import JsonObject
from torchrun_api.quantity import QuantityError, parse

_GPU_RESOURCES = (
    *("nvidia.com/gpu", "nvidia.com/gpu.shared", "amd.com/gpu"),
    *("gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi"),
)
_MIG = "nvidia.com/mig-"
# Labels of nodes that have GPUs, whether or not a device plugin runs there. An empty value matches
# every value.
_GPU_LABELS: Mapping[str, str] = {
    "nvidia.com/gpu.present": "true",  # GPU feature discovery
    "feature.node.kubernetes.io/pci-10de.present": "true",  # node feature discovery; NVIDIA
    "cloud.google.com/gke-accelerator": "",
    "kubernetes.azure.com/accelerator": "nvidia",
    "karpenter.k8s.aws/instance-gpu-count": "",
}
_REPELS = ("NoSchedule", "NoExecute")
_LIFECYCLE = "node.kubernetes.io/"  # taints of nodes that are not ready or cordoned
_ADMISSION_FIELDS = ("quota", "weight", "cohort")  # a queue that has one waits for admission


class QueueRequest(NamedTuple):
    """What the pods of a queue ask of a node."""

    queue: str
    gpus: int
    resource: str
    tolerations: Sequence[JsonObject]


def check_nodes(snapshot: ClusterSnapshot) -> list[Finding]:
    """GPUs of the nodes, compared with what the queues request for one node."""
    nodes = snapshot.items("nodes")
    autoscaler = find_autoscaler(snapshot)
    requests = [_request_of(queue) for queue in snapshot.queues()]
    findings = [_count(nodes, autoscaler)]
    resources = _gpu_resources(nodes)
    for resource in sorted({*resources, *(r.resource for r in requests if r.gpus)}):
        counts = [_amount(node, resource) for node in nodes]
        largest = max(counts, default=0)
        if largest:
            having = sum(1 for count in counts if count)
            where = "1 node" if having == 1 else f"{having} nodes"
            text = f"{sum(counts)} {resource} on {where}, at most {largest} on one"
            findings.append(Finding("ok", "GPUs", text))
        for request in requests:
            if request.resource == resource and request.gpus > largest:
                findings.append(_missing(snapshot, request, largest, resources, autoscaler))
            elif request.resource == resource and request.gpus:
                findings += _check_taints(snapshot, request, nodes)
    findings += _check_plugin(snapshot, nodes)
    if not any(finding.subject == "GPUs" for finding in findings):
        findings.append(Finding("note", "GPUs", "None; queues without GPUs run on CPUs (gloo)"))
    return findings


def check_autoscaler(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether an autoscaler adds nodes, and whether admission lets it see the pods."""
    autoscaler = find_autoscaler(snapshot)
    if not autoscaler:
        snapshot.groups()  # raises why it cannot be read
        snapshot.find("cluster-autoscaler")
        snapshot.find("openshift-autoscalers")
        return [Finding("ok", "autoscaler", "None found: jobs run on the nodes that exist")]
    text = f"{autoscaler} adds nodes for pending pods"
    queues = [
        name_of(queue)
        for queue in snapshot.queues()
        if any(field_at(queue, "spec", field) is not None for field in _ADMISSION_FIELDS)
    ]
    if not queues or _ignores_nodes(snapshot):
        return [Finding("ok", "autoscaler", text)]
    text += (
        f", but jobs of {', '.join(queues)} get no pods before the nodes have room for them, so it"
        " adds none (WaitingForNodes, ExceedsNodes)"
    )
    fix = "Run the controller with --admit-by-nodes=false (chart: settings.admitByNodes)"
    if snapshot.is_unreadable("deployments"):
        text += ". Its setting --admit-by-nodes could not be read"
        return [Finding("note", "autoscaler", text, fix)]
    return [Finding("warn", "autoscaler", text, fix)]


def _ignores_nodes(snapshot: ClusterSnapshot) -> bool:
    """Whether the controller admits jobs by quota only."""
    if snapshot.is_unreadable("deployments"):
        return False
    for item in snapshot.items("deployments"):
        for container in items_at(item, "spec", "template", "spec", "containers"):
            for variable in items_at(container, "env"):
                if text_at(variable, "name") == "TORCHRUN_ADMIT_BY_NODES":
                    return text_at(variable, "value").lower() == "false"
            words = " ".join([*words_at(container, "command"), *words_at(container, "args")])
            if re.search(r"--admit-by-nodes[= ]false\b", words):
                return True
    return False


def find_autoscaler(snapshot: ClusterSnapshot) -> str:
    """The name of what adds nodes; "" if nothing readable says so."""
    if not snapshot.is_unreadable("groups") and "karpenter.sh" in snapshot.groups():
        return "Karpenter"
    for name in ("cluster-autoscaler", "openshift-autoscalers"):
        if snapshot.is_unreadable(name):
            continue
        found = snapshot.find(name)
        if found is not None and field_at(found, "items") != []:
            return "cluster-autoscaler"
    return ""


def _request_of(queue: JsonObject) -> QueueRequest:
    resources = object_of(queue, "spec", "nodeResources")
    return QueueRequest(
        name_of(queue),
        int(text_at(resources, "gpus") or 0),
        text_at(resources, "gpuResourceName") or "nvidia.com/gpu",
        [
            *items_at(queue, "spec", "scheduling", "tolerations"),
            *items_at(queue, "spec", "podTemplate", "spec", "tolerations"),
        ],
    )


def _count(nodes: Sequence[JsonObject], autoscaler: str) -> Finding:
    if not nodes and autoscaler:
        text = f"0 nodes; {autoscaler} adds them when pods are pending"
        return Finding("note", "nodes", text)
    text = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    if not nodes:
        return Finding("fail", "nodes", text, "Add nodes: no job can run")
    unusable = [node for node in nodes if not _is_usable(node)]
    if not unusable:
        return Finding("ok", "nodes", text)
    text += f"; {len(unusable)} not ready or cordoned, such as {name_of(unusable[0])}"
    fix = "kubectl get nodes; gangs start on the others only"
    return Finding("warn" if len(unusable) == len(nodes) else "note", "nodes", text, fix)


def _is_usable(node: JsonObject) -> bool:
    ready = [c for c in items_at(node, "status", "conditions") if text_at(c, "type") == "Ready"]
    return field_at(node, "spec", "unschedulable") is not True and all(
        text_at(condition, "status") == "True" for condition in ready
    )


def _gpu_resources(nodes: Sequence[JsonObject]) -> list[str]:
    """Resources of the nodes that stand for a GPU or a part of one."""
    offered = {name for node in nodes for name in object_of(node, "status", "allocatable")}
    return sorted(name for name in offered if name in _GPU_RESOURCES or name.startswith(_MIG))


def _amount(node: JsonObject, resource: str) -> int:
    try:
        return int(parse(text_at(node, "status", "allocatable", resource) or 0))
    except QuantityError:
        return 0


def _missing(
    snapshot: ClusterSnapshot,
    request: QueueRequest,
    largest: int,
    resources: Sequence[str],
    autoscaler: str,
) -> Finding:
    text = (
        f"Queue {request.queue} requests {request.gpus} {request.resource} for a node, but no node"
        f" has more than {largest}"
    )
    if autoscaler:
        fix = "Check that one of its node groups has such nodes"
        return Finding("note", "GPUs", f"{text} now. {autoscaler} can add nodes", fix)
    others = [name for name in resources if name != request.resource]
    if others and not largest:
        fix = f"Set nodeResources.gpuResourceName to what the nodes have: {', '.join(others)}"
    else:
        fix = f"{environment_of(snapshot).gpus}; or add nodes, or lower nodeResources.gpus"
    unknown = any(map(snapshot.is_unreadable, ("groups", "cluster-autoscaler")))
    if unknown:
        text += ". Whether an autoscaler can add one is not known: no permission to read it"
    return Finding("warn" if unknown else "fail", "GPUs", text, fix)


def _check_taints(
    snapshot: ClusterSnapshot, request: QueueRequest, nodes: Sequence[JsonObject]
) -> Iterator[Finding]:
    """A finding if each node with enough GPUs has a taint that the queue does not tolerate."""
    repelling = []
    for node in nodes:
        if _amount(node, request.resource) < request.gpus:
            continue
        taint = next(
            (
                taint
                for taint in items_at(node, "spec", "taints")
                if text_at(taint, "effect") in _REPELS
                and not text_at(taint, "key").startswith(_LIFECYCLE)
                and not any(_tolerates(t, taint) for t in request.tolerations)
                # GKE adds the toleration (admission plugin ExtendedResourceToleration).
                and not (
                    text_at(taint, "key") == request.resource and environment_of(snapshot) == GKE
                )
            ),
            None,
        )
        if taint is None:
            return
        repelling.append(taint)
    if repelling:
        key, value, effect = (text_at(repelling[0], part) for part in ("key", "value", "effect"))
        shown = f"{key}={value}:{effect}" if value else f"{key}:{effect}"
        text = (
            f"Every node with {request.gpus} {request.resource} has a taint that queue"
            f" {request.queue} does not tolerate, such as {shown}: its pods stay Pending"
        )
        fix = f"Add to scheduling.tolerations: {{key: {key}, operator: Exists, effect: {effect}}}"
        yield Finding("warn", "GPUs", text, fix)


def _tolerates(toleration: JsonObject, taint: JsonObject) -> bool:
    """As in k8s.io/api/core/v1 (toleration.go)."""
    effect, key = text_at(toleration, "effect"), text_at(toleration, "key")
    if effect and effect != text_at(taint, "effect"):
        return False
    if key and key != text_at(taint, "key"):
        return False
    if text_at(toleration, "operator") == "Exists":
        return True
    return bool(key) and text_at(toleration, "value") == text_at(taint, "value")


def _check_plugin(snapshot: ClusterSnapshot, nodes: Sequence[JsonObject]) -> Iterator[Finding]:
    """Nodes that have GPUs by their labels, but no resource for them."""
    without = [
        name_of(node)
        for node in nodes
        if any(
            found and wanted in ("", found)
            for label, wanted in _GPU_LABELS.items()
            if (found := text_at(node, "metadata", "labels", label))
        )
        and not any(_amount(node, resource) for resource in _gpu_resources([node]))
    ]
    if without:
        shown = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
        text = (
            f"Nodes with GPUs by their labels offer none to pods ({len(without)}: {shown}): no"
            " device plugin runs there, or the driver does not work"
        )
        yield Finding("warn", "GPUs", text, environment_of(snapshot).gpus)
