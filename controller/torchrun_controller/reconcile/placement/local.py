"""Where a gang goes whose checkpoints stay on its nodes: back to them, else where most room is.

The room of a node is its allocatable ephemeral storage less what the workers there were promised.
The rule is greedy: one worker after the other takes the node that has most left.
"""

from torchrun_api.core import Node
from torchrun_api.json import JsonObject
from torchrun_api.quantity import QuantityError, parse
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.placement.affinity import prefer
from torchrun_controller.reconcile.placement.avoid import hostnames
from torchrun_controller.reconcile.pods.nodes import ready_condition
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec

# An Indexed Job cannot pin an index to a node, so both are wishes, the first by far the stronger.
WHERE_THEY_ARE = 100
MOST_ROOM = 20


def nodes_with_checkpoints(observed: Observed) -> tuple[str, ...]:
    """Nodes of the last gang that kept its checkpoints on them, once all of it has been placed."""
    here = {
        worker.spec.node_name
        for worker in observed.gang.workers
        if worker.metadata.annotations.local_checkpoints
    }
    remembered = observed.job.status.checkpoint_nodes
    return tuple(sorted(here)) if here and "" not in here else remembered


def prefer_local(template: JsonObject, observed: Observed, run: ResolvedSpec) -> JsonObject:
    """The v1 PodTemplateSpec with the wishes of node-local checkpoints, if it has such."""
    if run.checkpoints is None or not run.checkpoints.host_path:
        return template
    known = nodes_with_checkpoints(observed)
    roomy = tuple(node for node in _roomiest(observed, run) if node not in known)
    template = prefer(template, "In", hostnames(observed, known), WHERE_THEY_ARE)
    return prefer(template, "In", hostnames(observed, roomy), MOST_ROOM)


def _roomiest(observed: Observed, run: ResolvedSpec) -> tuple[str, ...]:
    """Nodes for the whole gang by the greedy rule; none where nothing is known of nodes."""
    assert run.checkpoints is not None
    size = int(parse(run.checkpoints.size))
    rooms = {
        name: _room(node) - observed.cluster.promised.get(name, 0)
        for name, node in (observed.cluster.nodes or {}).items()
        if _takes_pods(node, run.node_selector)
    }
    chosen: set[str] = set()
    for _ in range(run.size.nodes if rooms else 0):
        best = min(rooms, key=lambda name: (-rooms[name], name))
        rooms[best] -= size
        chosen.add(best)
    return tuple(sorted(chosen))


def _takes_pods(node: Node, selector: dict[str, str]) -> bool:
    ready = ready_condition(node)
    labels = node.metadata.labels
    return (
        ready is not None
        and ready.status == "True"
        and not node.spec.unschedulable
        and all(labels.get(key) == value for key, value in selector.items())
    )


def _room(node: Node) -> int:
    """Bytes."""
    try:
        return int(parse(node.status.allocatable.get("ephemeral-storage", "0")))
    except QuantityError:
        return 0
