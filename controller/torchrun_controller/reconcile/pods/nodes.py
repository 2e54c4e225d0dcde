"""Lost nodes: the kubelet is silent, or the Node object is gone.

The containers on a lost node may go on. Kubernetes deletes its pods 300 s after NotReady, and then
waits without limit for the kubelet to confirm their end.

Arguments `nodes` are Node objects by name, or None where the controller may not read nodes.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from msgspec import Struct

from torchrun_api.core import Node, NodeCondition, Pod
from torchrun_controller.reconcile.model.conditions import find_condition

# A restart of the kubelet or a short network failure is over by then. It comes on top of the 50 s
# that the node lifecycle controller waits after the last heartbeat before it sets NotReady.
LOST_AFTER = timedelta(seconds=40)
# An administrator sets it: the machine is off (kubernetes.io, "Non-graceful node shutdown").
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
# Seconds. The permission to read nodes may be missing: no change of a node wakes the job then.
NODES_RETRY = 10.0
NOT_READ = "NodesNotRead"


class NodeLoss(Struct, frozen=True):
    """A node that counts as lost. message: a sentence. since: None if that is not known."""

    message: str
    since: datetime | None = None


def find_loss(nodes: Mapping[str, Node] | None, pod: Pod, now: datetime) -> NodeLoss | None:
    """Return why the pod's node is lost, LOST_AFTER its first silence; None if it is not."""
    silence = find_silence(nodes, pod, now)
    if nodes is None or silence is None or _time_until_lost(nodes, pod, now) > timedelta():
        return None
    return silence


def find_silence(nodes: Mapping[str, Node] | None, pod: Pod, now: datetime) -> NodeLoss | None:
    """Return why the pod's node is silent: as `find_loss`, but from the start of NotReady on."""
    name = pod.spec.node_name
    if nodes is None or not name:
        return None
    node = nodes.get(name)
    subject = f"Node {name} of pod {pod.metadata.name}"
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
    """Return the seconds until the next node of these pods counts as lost, if none recovers."""
    if nodes is None:
        return None
    waits = (
        _time_until_lost(nodes, pod, now).total_seconds() for pod in pods if pod.spec.node_name
    )
    return min((seconds for seconds in waits if seconds > 0), default=None)


def find_lost_nodes(nodes: Iterable[Node], now: datetime) -> tuple[frozenset[str], float | None]:
    """Return the names of the lost nodes, and the seconds until the next node counts as lost.

    It answers for whole nodes what `find_loss` answers for the node of one pod. Only a node without
    an object is missing: it is in no list of nodes, and Kubernetes deletes its pods.
    """
    lost_nodes, waits = set(), []
    for node in nodes:
        if is_ready(node):
            continue
        wait = _time_to_recover(_not_ready_since(node), now).total_seconds()
        if wait > 0:
            waits.append(wait)
        else:
            lost_nodes.add(node.metadata.name)
    return frozenset(lost_nodes), min(waits, default=None)


def _time_until_lost(nodes: Mapping[str, Node], pod: Pod, now: datetime) -> timedelta:
    """Return how long the pod's node has left to recover; zero where nothing is wrong with it.

    The watch of nodes may lag behind the watch of pods. A node without an object may be new, and
    one that was silent before its pod was scheduled may be back, until LOST_AFTER its scheduling.
    """
    node, scheduled = nodes.get(pod.spec.node_name), _scheduled_at(pod)
    since = scheduled if node is None else _not_ready_since(node)
    if since is not None and scheduled is not None:
        since = max(since, scheduled)
    return _time_to_recover(since, now)


def _time_to_recover(since: datetime | None, now: datetime) -> timedelta:
    """Return what is left of LOST_AFTER; zero without a start. A start in the future is now."""
    return timedelta() if since is None else min(since + LOST_AFTER - now, LOST_AFTER)


def _scheduled_at(pod: Pod) -> datetime | None:
    condition = find_condition(pod.status.conditions, "PodScheduled")
    return pod.metadata.creation_timestamp if condition is None else condition.last_transition_time


def _not_ready_since(node: Node) -> datetime | None:
    ready = ready_condition(node)
    if ready is None or ready.status == "True" or is_out_of_service(node):
        return None
    return ready.last_transition_time


def ready_condition(node: Node) -> NodeCondition | None:
    """Return the condition Ready; a new node has none."""
    return find_condition(node.status.conditions, "Ready")


def is_ready(node: Node) -> bool:
    """Whether the kubelet is not silent and the node is not out of service."""
    ready = ready_condition(node)
    return (ready is None or ready.status == "True") and not is_out_of_service(node)


def is_out_of_service(node: Node) -> bool:
    """Whether an administrator has declared that nothing runs on the node any more."""
    return any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints)
