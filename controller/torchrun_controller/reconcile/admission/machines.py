"""Nodes as the coordinator sees them: what they have, and whom their taints keep away.

A taint that some jobs tolerate becomes a label of every node: a job that does not tolerate it asks
for nodes without it, as it asks for labels.
"""

from collections.abc import Iterable
from math import ceil, floor

from torchrun_api import core
from torchrun_api.json import JsonObject
from torchrun_api.quantity import QuantityError, parse
from torchrun_controller.reconcile.admission.state import Node
from torchrun_controller.reconcile.placement.nodes import ready_condition

# Kubernetes' own taints say that the node takes nobody (kubernetes.io, "Taints and Tolerations").
LIFECYCLE = "node.kubernetes.io/"
KEEPS_AWAY = frozenset({"NoSchedule", "NoExecute"})
ABSENT, PRESENT = "absent", "present"


def machine(node: core.Node, taints: frozenset[core.Taint]) -> Node:
    """`taints` are those of all nodes that some jobs may tolerate."""
    own = set(node.spec.taints)
    marks = {label_of(taint): PRESENT if taint in own else ABSENT for taint in taints}
    return Node(
        name=node.metadata.name,
        labels=node.metadata.labels | marks,
        allocatable=_amounts(node.status.allocatable),
        usable=_is_usable(node),
    )


def facts(node: core.Node | None) -> object:
    """What of a node matters here; heartbeats, images and addresses do not."""
    if node is None:
        return None
    allocatable = node.status.allocatable
    return node.metadata.labels, node.spec.taints, allocatable, _is_usable(node)


def tolerable(nodes: Iterable[core.Node]) -> frozenset[core.Taint]:
    """The taints by which nodes are kept for some jobs."""
    found = (taint for node in nodes for taint in node.spec.taints)
    return frozenset(t for t in found if t.effect in KEEPS_AWAY and not t.key.startswith(LIFECYCLE))


def label_of(taint: core.Taint) -> str:
    """A label that no node can have: its key has a second slash."""
    return f"taint/{taint.key}={taint.value}/{taint.effect}"


def avoided(
    taints: Iterable[core.Taint], tolerations: tuple[JsonObject, ...], devices: Iterable[str]
) -> dict[str, str]:
    """What a job with these tolerations asks of a node's labels for the sake of its taints.

    A taint with the name of a device keeps those away that do not request it: the admission plugin
    ExtendedResourceToleration lets the others in.
    """
    kept_for = frozenset(devices)
    return {
        label_of(taint): ABSENT
        for taint in taints
        if taint.key not in kept_for and not any(_tolerates(t, taint) for t in tolerations)
    }


def _tolerates(toleration: JsonObject, taint: core.Taint) -> bool:
    """As in k8s.io/api/core/v1 (toleration.go)."""
    effect, key = toleration.get("effect"), toleration.get("key")
    if effect and effect != taint.effect:
        return False
    if key and key != taint.key:
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(key) and (toleration.get("value") or "") == taint.value


def pod_of(requests: dict[str, str]) -> dict[str, int]:
    """What a pod takes of a node, itself included; rounded up.

    Raises QuantityError.
    """
    return {"pods": 1} | {name: _whole(name, value, up=True) for name, value in requests.items()}


def _amounts(allocatable: dict[str, str]) -> dict[str, int]:
    found = {}
    for name, value in allocatable.items():
        try:
            found[name] = _whole(name, value, up=False)
        except QuantityError:
            continue
    return found


def _whole(name: str, value: int | str, *, up: bool) -> int:
    amount = parse(value) * (1000 if name == "cpu" else 1)
    return ceil(amount) if up else floor(amount)


def _is_usable(node: core.Node) -> bool:
    ready = ready_condition(node)
    taken = any(t.key.startswith(LIFECYCLE) and t.effect in KEEPS_AWAY for t in node.spec.taints)
    return ready is not None and ready.status == "True" and not (node.spec.unschedulable or taken)
