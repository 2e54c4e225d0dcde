"""Preferred nodes of a gang with node-local checkpoints: the same ones, else the emptiest ones.

The free bytes of a node are its allocatable ephemeral storage without the sizes of the checkpoints
of other workers. The rule is greedy: each worker in turn takes the node with most free bytes.
"""

from torchrun_api.core import Node
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.quantity import amount_of
from torchrun_controller.reconcile.model.observed import ObservedCluster, ObservedGang
from torchrun_controller.reconcile.placement.affinity import add_preference, hostnames
from torchrun_controller.reconcile.pods.nodes import ready_condition
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec

# Weights. An Indexed Job cannot pin an index to a node, so both are preferences.
CHECKPOINT_WEIGHT = 100
STORAGE_WEIGHT = 20


def nodes_with_checkpoints(job: TorchrunJob, gang: ObservedGang) -> tuple[str, ...]:
    """Return the nodes of the last gang with node-local checkpoints that was scheduled whole."""
    node_names = {
        worker.spec.node_name
        for worker in gang.workers
        if worker.metadata.annotations.local_checkpoints
    }
    return (
        tuple(sorted(node_names))
        if node_names and "" not in node_names
        else job.status.checkpoint_nodes
    )


def prefer_checkpoint_nodes(
    template: JsonObject,
    run: ResolvedSpec,
    checkpoint_nodes: tuple[str, ...],
    cluster: ObservedCluster,
) -> JsonObject:
    """Return the v1 PodTemplateSpec with the preferences that node-local checkpoints need."""
    if run.checkpoints is None or not run.checkpoints.host_path:
        return template
    empty_nodes = tuple(
        node for node in _emptiest_nodes(run, cluster) if node not in checkpoint_nodes
    )
    nodes = cluster.nodes
    checkpoint_hosts = hostnames(nodes, checkpoint_nodes)
    template = add_preference(template, "In", checkpoint_hosts, CHECKPOINT_WEIGHT)
    return add_preference(template, "In", hostnames(nodes, empty_nodes), STORAGE_WEIGHT)


def _emptiest_nodes(run: ResolvedSpec, cluster: ObservedCluster) -> tuple[str, ...]:
    """Return nodes for the whole gang by the greedy rule; none where no node can be read."""
    assert run.checkpoints is not None
    size = int(amount_of(run.checkpoints.size))
    free_bytes = {
        name: _allocatable(node) - cluster.promised.get(name, 0)
        for name, node in (cluster.nodes or {}).items()
        if _accepts_pods(node, run.node_selector)
    }
    chosen_nodes: set[str] = set()
    for _ in range(run.size.nodes if free_bytes else 0):
        emptiest = min(free_bytes, key=lambda name: (-free_bytes[name], name))
        free_bytes[emptiest] -= size
        chosen_nodes.add(emptiest)
    return tuple(sorted(chosen_nodes))


def _accepts_pods(node: Node, selector: dict[str, str]) -> bool:
    condition = ready_condition(node)
    labels = node.metadata.labels
    return (
        condition is not None
        and condition.status == "True"
        and not node.spec.unschedulable
        and all(labels.get(key) == value for key, value in selector.items())
    )


def _allocatable(node: Node) -> int:
    """Return the allocatable ephemeral storage in bytes."""
    return int(amount_of(node.status.allocatable.get("ephemeral-storage", "0")))
