"""Nodes that are lost: nothing is heard from their kubelet, or there is no Node object any more.

A lost node's containers may well go on. Kubernetes itself gives up on its pods 300 s after NotReady
and then waits for ever for word of their end.
"""

from datetime import datetime, timedelta

from msgspec import Struct

from torchrun_api.core import Node, NodeCondition, Pod
from torchrun_controller.reconcile.model.conditions import find_condition
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.pods.lifecycle import alive

# A restart of the kubelet or of the network is over by then. The node lifecycle controller says
# NotReady some 50 s after the last heartbeat, so this comes on top.
LOST_AFTER = timedelta(seconds=40)
# Set by an administrator: the machine is off (kubernetes.io, "Non-graceful node shutdown").
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class Loss(Struct, frozen=True):
    """Why a node counts as lost, and since when it is, where that is known."""

    message: str
    since: datetime | None = None


def loss(observed: Observed, pod: Pod, now: datetime) -> Loss | None:
    """Why the pod's node is lost; None while it is not, or nothing is known of nodes at all."""
    silent = silence(observed, pod, now)
    return silent if silent is not None and _left(observed, pod, now) <= timedelta() else None


def silence(observed: Observed, pod: Pod, now: datetime) -> Loss | None:
    """Why nothing is heard of the pod's node: as `loss`, but from the first moment of NotReady."""
    name = pod.spec.node_name
    if observed.cluster.nodes is None or not name:
        return None
    node = observed.cluster.nodes.get(name)
    if node is None:
        if _left(observed, pod, now) > timedelta():
            return None
        return Loss(f"node {name} is gone from the API, which stops no container")
    if out_of_service(node):
        return Loss(f"node {name} is tainted out-of-service")
    ready = ready_condition(node)
    if ready is None or ready.status == "True":
        return None
    since = ready.last_transition_time
    told = f" since {since:%Y-%m-%dT%H:%M:%SZ}" if since else ""
    return Loss(f"node {name} is NotReady{told}", since)


def next_look(observed: Observed, now: datetime) -> float | None:
    """Seconds until the next node of a pod counts as lost, as things stand."""
    if observed.cluster.nodes is None:
        return None
    syncing = (pod for pod in observed.workspace.sync_pods if alive(pod))
    everyone = (*observed.gang.workers, *observed.gang.stale_pods, *syncing)
    pods = (pod for pod in everyone if pod.spec.node_name)
    left = (_left(observed, pod, now).total_seconds() for pod in pods)
    return min((seconds for seconds in left if seconds > 0), default=None)


def _left(observed: Observed, pod: Pod, now: datetime) -> timedelta:
    """For how long the node of the pod is still given its chance; zero where it needs none.

    The watch of nodes may lag behind that of pods: a node that is not known is one that has just
    come, until the pod has been there for long enough.
    """
    assert observed.cluster.nodes is not None
    node = observed.cluster.nodes.get(pod.spec.node_name)
    since = _placed(pod) if node is None else _not_ready_since(node)
    if since is None:
        return timedelta()
    return min(since + LOST_AFTER - now, LOST_AFTER)


def _placed(pod: Pod) -> datetime | None:
    scheduled = find_condition(pod.status.conditions, "PodScheduled")
    return pod.metadata.creation_timestamp if scheduled is None else scheduled.last_transition_time


def _not_ready_since(node: Node) -> datetime | None:
    ready = ready_condition(node)
    if ready is None or ready.status == "True" or out_of_service(node):
        return None
    return ready.last_transition_time


def ready_condition(node: Node) -> NodeCondition | None:
    """The condition Ready; a node that has just come has none."""
    return find_condition(node.status.conditions, "Ready")


def is_ready(node: Node) -> bool:
    """Whether its kubelet is heard of, and nobody says that the machine is off."""
    ready = ready_condition(node)
    return (ready is None or ready.status == "True") and not out_of_service(node)


def out_of_service(node: Node) -> bool:
    """Whether somebody vouches that nothing runs on the node any more."""
    return any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints)
