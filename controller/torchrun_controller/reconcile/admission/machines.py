"""Nodes as the coordinator sees them: what they have, and whom their taints keep away.

A taint that some jobs tolerate becomes a label of every node: a job that does not tolerate it asks
for nodes without it, as it asks for labels.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import ceil, floor
from types import MappingProxyType

from torchrun_api import core
from torchrun_api.json import JsonObject
from torchrun_api.quantity import QuantityError, parse
from torchrun_controller.reconcile.admission.state import Node
from torchrun_controller.reconcile.pods.nodes import ready_condition

# Kubernetes' own taints say that the node takes nobody (kubernetes.io, "Taints and Tolerations").
LIFECYCLE = "node.kubernetes.io/"
KEEPS_AWAY = frozenset({"NoSchedule", "NoExecute"})
NOTHING: Mapping[str, int] = MappingProxyType({})
ABSENT, PRESENT = "absent", "present"


def machine(
    node: core.Node, taints: frozenset[core.Taint], overhead: Mapping[str, int] = NOTHING
) -> Node:
    """`taints` are those of all nodes that some jobs may tolerate; `overhead` is what others use.

    Pods of others are not watched, as there may be ten times as many as ours: what DaemonSets take
    of each node, an administrator says.
    """
    own = set(node.spec.taints)
    marks = {label_of(taint): PRESENT if taint in own else ABSENT for taint in taints}
    return Node(
        name=node.metadata.name,
        labels=node.metadata.labels | marks,
        allocatable={
            name: max(0, amount - overhead.get(name, 0))
            for name, amount in _amounts(node.status.allocatable).items()
        },
        usable=_is_usable(node),
    )


def parse_overhead(text: str) -> dict[str, int]:
    """Read "cpu=2,memory=8Gi,pods=10", in the units of Node.allocatable. Raises ValueError."""
    overhead = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = part.partition("=")
        if not name or not separator or name in overhead:
            raise ValueError
        overhead[name] = ceil(_amount(name, value))
    return overhead


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


def _amounts(allocatable: dict[str, str]) -> dict[str, int]:
    found = {}
    for name, value in allocatable.items():
        try:
            found[name] = floor(_amount(name, value))
        except QuantityError:
            continue
    return found


def _amount(name: str, value: int | str) -> Fraction:
    return parse(value) * (1000 if name == "cpu" else 1)


def _is_usable(node: core.Node) -> bool:
    ready = ready_condition(node)
    taken = any(t.key.startswith(LIFECYCLE) and t.effect in KEEPS_AWAY for t in node.spec.taints)
    return ready is not None and ready.status == "True" and not (node.spec.unschedulable or taken)
