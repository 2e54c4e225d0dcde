"""Nodes as input of the coordinator: their capacity, and the jobs that their taints repel.

A taint that some jobs tolerate becomes a label of every machine: a job that does not tolerate it
selects machines without it, like a node label.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import ceil, floor
from types import MappingProxyType

from torchrun_api.json import JsonObject
from torchrun_api.kinds import core
from torchrun_api.kinds.quantity import QuantityError, parse
from torchrun_controller.reconcile.admission.model import NodeCapacity
from torchrun_controller.reconcile.pods.nodes import REPELS, ready_condition, tolerates

# Kubernetes' own taints say that the machine takes no pods (kubernetes.io, "Taints and
# Tolerations").
LIFECYCLE = "node.kubernetes.io/"
NO_OVERHEAD: Mapping[str, int] = MappingProxyType({})
ABSENT, PRESENT = "absent", "present"


def node_capacity(
    node: core.Node, taints: frozenset[core.Taint], overhead: Mapping[str, int] = NO_OVERHEAD
) -> NodeCapacity:
    """Return the capacity of a machine. `taints` are those of all machines that jobs may tolerate.

    `overhead` is what other pods use. The controller does not watch them, as there may be ten times
    as many: an administrator configures what DaemonSets take of each machine.
    """
    node_taints = set(node.spec.taints)
    labels = {label_of(taint): PRESENT if taint in node_taints else ABSENT for taint in taints}
    return NodeCapacity(
        name=node.metadata.name,
        labels=node.metadata.labels | labels,
        allocatable={
            name: max(0, amount - overhead.get(name, 0))
            for name, amount in _amounts(node.status.allocatable).items()
        },
        usable=_is_usable(node),
    )


def parse_overhead(text: str) -> dict[str, int]:
    """Read "cpu=2,memory=8Gi,pods=10" in the units of NodeCapacity. Raises ValueError."""
    overhead = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = part.partition("=")
        if not name or not separator or name in overhead:
            raise ValueError
        overhead[name] = ceil(_amount(name, value))
    return overhead


def relevant_fields(node: core.Node | None) -> object:
    """Return what admission reads of a machine: no heartbeats, images or addresses."""
    if node is None:
        return None
    allocatable = node.status.allocatable
    return node.metadata.labels, node.spec.taints, allocatable, _is_usable(node)


def find_taints(nodes: Iterable[core.Node]) -> frozenset[core.Taint]:
    """Return the taints that reserve machines for the jobs that tolerate them."""
    taints = (taint for node in nodes for taint in node.spec.taints)
    return frozenset(t for t in taints if t.effect in REPELS and not t.key.startswith(LIFECYCLE))


def label_of(taint: core.Taint) -> str:
    """Return a label that no machine can have: its key has a second slash."""
    return f"taint/{taint.key}={taint.value}/{taint.effect}"


def taint_selector(
    taints: Iterable[core.Taint], tolerations: tuple[JsonObject, ...], devices: Iterable[str]
) -> dict[str, str]:
    """Return the labels that a job with these tolerations has to select.

    Pods that request a device tolerate a taint with its name: the admission plugin
    ExtendedResourceToleration adds it.
    """
    requested_devices = frozenset(devices)
    return {
        label_of(taint): ABSENT
        for taint in taints
        if taint.key not in requested_devices and not any(tolerates(t, taint) for t in tolerations)
    }


def _amounts(allocatable: dict[str, str]) -> dict[str, int]:
    amounts = {}
    for name, value in allocatable.items():
        try:
            amounts[name] = floor(_amount(name, value))
        except QuantityError:
            continue
    return amounts


def _amount(name: str, value: int | str) -> Fraction:
    return parse(value) * (1000 if name == "cpu" else 1)


def _is_usable(node: core.Node) -> bool:
    ready = ready_condition(node)
    repels = any(t.key.startswith(LIFECYCLE) and t.effect in REPELS for t in node.spec.taints)
    return ready is not None and ready.status == "True" and not (node.spec.unschedulable or repels)
