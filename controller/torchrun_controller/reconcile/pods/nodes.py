"""Lost machines: the kubelet is silent, or the Node object is gone.

The containers on a lost machine may go on. Kubernetes deletes its pods 300 s after NotReady, and
then waits without limit for the kubelet to confirm their end.

If most machines fall silent together, the cause is rather their way to the API server. None of them
counts as lost then, as Kubernetes evicts nobody either, until an administrator confirms it (taint
out-of-service, or no Node object any more) or its pod is deleted: the failure of a peer on another
machine ends the gang, and so deletes all its pods.

Arguments `nodes` are Node objects by name, or None where the controller may not read them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Node, NodeCondition, Pod, Taint
from torchrun_controller.reconcile.model.conditions import find_condition
from torchrun_controller.reconcile.pods.lifecycle import PodState, state_of

# A restart of the kubelet or a short network failure is over by then. It comes on top of the 50 s
# that the node lifecycle controller waits after the last heartbeat before it sets NotReady.
LOST_AFTER = timedelta(seconds=40)
# The node lifecycle controller has the same limits (--unhealthy-zone-threshold, ComputeZoneState).
MASS_PERCENT, MASS_COUNT = 55, 3
# Machines fall silent together if no more than this is between one and the next.
TOGETHER = timedelta(minutes=1)
# Until when machines that fell silent together are doubted, while most of them are silent.
STILL = datetime.max.replace(tzinfo=UTC)
_EARLIEST = datetime.min.replace(tzinfo=UTC)
# An administrator sets it: the machine is off (kubernetes.io, "Non-graceful node shutdown").
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
# Taints that keep new pods away.
REPELS = frozenset({"NoSchedule", "NoExecute"})
# Taints of machines that are about to leave, and who sets them. Not among them are taints of a
# mere risk or candidate (aws-node-termination-handler/rebalance-recommendation,
# DeletionCandidateOfClusterAutoscaler) and a cordon: administrators cordon to look at a machine.
LEAVING_TAINTS = {
    # https://cloud.google.com/kubernetes-engine/docs/concepts/handle-disruption-gpu-tpu
    # The key is in the arguments of GKE's maintenance-handler, and in kubernetes-mixin
    # (kubeNodeUnreachableIgnoreKeys).
    "cloud.google.com/impending-node-termination": "GKE",
    # https://github.com/aws/aws-node-termination-handler, pkg/node/node.go
    "aws-node-termination-handler/spot-itn": "the AWS node termination handler",
    "aws-node-termination-handler/scheduled-maintenance": "the AWS node termination handler",
    "aws-node-termination-handler/asg-lifecycle-termination": "the AWS node termination handler",
    # https://learn.microsoft.com/azure/aks/node-auto-drain; formerly the second key
    "remediator.kubernetes.azure.com/unschedulable": "AKS",
    "remediator.aks.microsoft.com/unschedulable": "AKS",
    # https://karpenter.sh/docs/concepts/disruption/; the second key before 1.0
    "karpenter.sh/disrupted": "Karpenter",
    "karpenter.sh/disruption": "Karpenter",
    # https://github.com/kubernetes/autoscaler, cluster-autoscaler/utils/taints
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler",
}
# Seconds. The permission to read Nodes may be missing: no change of a machine wakes the job then.
NODES_RETRY = 10.0
NOT_READ = "NodesNotRead"


class NodeLoss(Struct, frozen=True):
    """A machine that counts as lost. message: a sentence. since: None if that is not known."""

    message: str
    since: datetime | None = None


def find_loss(nodes: Mapping[str, Node] | None, pod: Pod, now: datetime) -> NodeLoss | None:
    """Return why the pod's machine is lost, LOST_AFTER its first silence; None if it is not.

    A pod whose containers are known to have stopped lost nothing.
    """
    if state_of(pod) is PodState.STOPPED:
        return None
    silence = find_silence(nodes, pod, now)
    if nodes is None or silence is None or _time_until_lost(nodes, pod, now) > timedelta():
        return None
    return silence


def find_silence(nodes: Mapping[str, Node] | None, pod: Pod, now: datetime) -> NodeLoss | None:
    """Return why the pod's machine is silent: as `find_loss`, but from the start of NotReady on."""
    name = pod.spec.node_name
    if nodes is None or not name:
        return None
    node = nodes.get(name)
    subject = f"Machine {name} of pod {pod.metadata.name}"
    if node is None:
        if _time_until_lost(nodes, pod, now) > timedelta():
            return None
        return NodeLoss(f"{subject} was deleted, but its containers may still run.")
    if is_out_of_service(node):
        return NodeLoss(f"{subject} has the taint out-of-service.")
    ready = ready_condition(node)
    if ready is None or ready.status == "True":
        return None
    since = ready.last_transition_time
    suffix = f" since {since:%Y-%m-%dT%H:%M:%SZ}" if since else ""
    return NodeLoss(f"{subject} is NotReady{suffix}.", since)


def next_loss(nodes: Mapping[str, Node] | None, pods: Iterable[Pod], now: datetime) -> float | None:
    """Return the seconds until the next machine of these pods counts as lost, if none recovers."""
    if nodes is None:
        return None
    waits = (
        _time_until_lost(nodes, pod, now).total_seconds() for pod in pods if pod.spec.node_name
    )
    return min((seconds for seconds in waits if seconds > 0), default=None)


def find_mass_silence(nodes: Iterable[Node]) -> dict[str, datetime]:
    """Return the machines that fell silent together with most others, and until when that held.

    The time is STILL while it holds; afterwards it is that of the recovery which ended it, and the
    machines that stay silent have LOST_AFTER from then on. Machines that were silent long before
    are not counted: nobody removes the Node objects of machines that are switched off.
    """
    total, silent, recovered = 0, [], []
    for node in nodes:
        ready = ready_condition(node)
        if node.spec.taints and is_out_of_service(node):
            continue
        total += 1
        since = None if ready is None else ready.last_transition_time
        if ready is None or since is None:
            continue
        if ready.status == "True":
            recovered.append((since, node.metadata.creation_timestamp or _EARLIEST))
        else:
            silent.append((since, node.metadata.name))
    silent.sort()
    recovered.sort()
    doubted: dict[str, datetime] = {}
    earlier = 0
    for group in _together(silent):
        start = group[0][0]
        required = max(MASS_COUNT, (total - earlier) * MASS_PERCENT // 100 + 1)
        missing = required - len(group)
        later = recovered[bisect_right(recovered, (start, STILL)) :] if missing > 0 else []
        back = [time for time, created in later if created <= start]
        if missing <= 0:
            doubted |= {name: STILL for _, name in group}
        elif len(back) >= missing:
            doubted |= {name: back[-missing] for _, name in group}
        earlier += len(group)
    return doubted


def _together(silent: list[tuple[datetime, str]]) -> Iterator[list[tuple[datetime, str]]]:
    """Split machines, sorted by the start of their silence, where none falls silent for a while."""
    group: list[tuple[datetime, str]] = []
    for since, name in silent:
        if group and since - group[-1][0] > TOGETHER:
            yield group
            group = []
        group.append((since, name))
    if group:
        yield group


def describe_mass_silence(nodes: Mapping[str, Node] | None, pods: Iterable[Pod]) -> str:
    """Return which machines of these pods are silent together with most others; "" for none."""
    names = sorted(
        {
            pod.spec.node_name
            for pod in pods
            if (node := (nodes or {}).get(pod.spec.node_name)) and node.doubted_until == STILL
        }
    )
    if not names:
        return ""
    listed = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
    return (
        f" Most machines of the cluster fell silent together, also {listed}. The gang goes on: none"
        f" counts as lost before it is confirmed. Set the taint {OUT_OF_SERVICE} on a machine that"
        " is off."
    )


def find_lost_nodes(nodes: Iterable[Node], now: datetime) -> tuple[frozenset[str], float | None]:
    """Return the names of the lost machines, and the seconds until the next one counts as lost.

    It answers for whole machines what `find_loss` answers for that of one pod. Only a machine
    without a Node object is missing: it is in no list, and Kubernetes deletes its pods.
    """
    lost_machines, waits = set(), []
    nodes = tuple(nodes)
    doubted = find_mass_silence(nodes)
    for node in nodes:
        if is_ready(node):
            continue
        since = _with_doubt(_not_ready_since(node), doubted.get(node.metadata.name))
        wait = _time_to_recover(since, now).total_seconds()
        if wait > 0:
            waits.append(wait)
        else:
            lost_machines.add(node.metadata.name)
    return frozenset(lost_machines), min(waits, default=None)


def _time_until_lost(nodes: Mapping[str, Node], pod: Pod, now: datetime) -> timedelta:
    """Return how long the pod's machine has left to recover; zero where nothing is wrong with it.

    The watch of Nodes may lag behind the watch of pods. A machine without an object may be new, and
    one that was silent before its pod was scheduled may be back, until LOST_AFTER its scheduling.
    """
    node, scheduled = nodes.get(pod.spec.node_name), _scheduled_at(pod)
    since = scheduled if node is None else _not_ready_since(node)
    if since is not None and scheduled is not None:
        since = max(since, scheduled)
    if node is not None and not pod.metadata.terminating:
        since = _with_doubt(since, node.doubted_until)
    return _time_to_recover(since, now)


def _with_doubt(since: datetime | None, doubted_until: datetime | None) -> datetime | None:
    """Return since when the silence counts: not before the end of the silence of most machines."""
    return since if since is None or doubted_until is None else max(since, doubted_until)


def _time_to_recover(since: datetime | None, now: datetime) -> timedelta:
    """Return what is left of LOST_AFTER; zero without a start. A start in the future is now."""
    return timedelta() if since is None else min(since - now, timedelta()) + LOST_AFTER


def _scheduled_at(pod: Pod) -> datetime | None:
    condition = find_condition(pod.status.conditions, "PodScheduled")
    return pod.metadata.creation_timestamp if condition is None else condition.last_transition_time


def _not_ready_since(node: Node) -> datetime | None:
    ready = ready_condition(node)
    if ready is None or ready.status == "True" or is_out_of_service(node):
        return None
    return ready.last_transition_time


def ready_condition(node: Node) -> NodeCondition | None:
    """Return the condition Ready; a new Node has none."""
    return find_condition(node.status.conditions, "Ready")


def is_ready(node: Node) -> bool:
    """Whether the kubelet is not silent and the machine is not out of service."""
    ready = ready_condition(node)
    return (ready is None or ready.status == "True") and not is_out_of_service(node)


def tolerates(toleration: JsonObject, taint: Taint) -> bool:
    """Whether a pod with the toleration may run there, as in k8s.io/api/core/v1 (toleration.go)."""
    effect, key = toleration.get("effect"), toleration.get("key")
    if effect and effect != taint.effect:
        return False
    if key and key != taint.key:
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(key) and (toleration.get("value") or "") == taint.value


def find_leaving_taint(node: Node) -> Taint | None:
    """Return the taint of a machine that is about to leave and takes no new pods; None for none.

    Karpenter and, by default, the cluster autoscaler set the taint alone, without a cordon.
    """
    return next(
        (
            taint
            for taint in node.spec.taints
            if taint.key in LEAVING_TAINTS and (node.spec.unschedulable or taint.effect in REPELS)
        ),
        None,
    )


def is_out_of_service(node: Node) -> bool:
    """Whether an administrator has declared that nothing runs on the machine any more."""
    return any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints)
