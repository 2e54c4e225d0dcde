"""Nodes that a gang prefers: not those where attempts failed, but those with its checkpoints.

A gang with node-local checkpoints prefers the machines that have them, else the emptiest ones. The
free bytes of a machine are its allocatable ephemeral storage without the sizes of the checkpoints
of other workers. The rule is greedy: each worker in turn takes the machine with most free bytes.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.kinds.core import Node
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.quantity import amount_of
from torchrun_api.kinds.status import Attempt
from torchrun_controller.reconcile.model.observed import ObservedCluster, ObservedGang
from torchrun_controller.reconcile.model.times import order_of
from torchrun_controller.reconcile.pods.nodes import ready_condition
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec

HOSTNAME = "kubernetes.io/hostname"
MOST_FAILURES = 1  # of a machine that is not avoided
# Failures that the machine may have caused: the machine was lost or restarted, its kubelet ended
# the pod, storage did not answer, or a signal ended the rank (as when a GPU has fallen off the
# bus). An exception, an exit code and the job's own limits of memory and storage (Evicted without a
# disruption) would occur on any machine. Preemption, drain and deletion have other causes.
NODE_FAILURES = frozenset(
    {
        "NodeLost",
        "ContainerStatusUnknown",
        "TerminationByKubelet",
        "DeletionByTaintManager",
        "Fenced",
        "Signaled",
    }
)
# Weights. An Indexed Job cannot pin an index to a machine, so both are preferences.
CHECKPOINT_WEIGHT = 100
STORAGE_WEIGHT = 20


def add_preference(
    template: JsonObject, operator: Literal["In", "NotIn"], hostnames: tuple[str, ...], weight: int
) -> JsonObject:
    """Return the v1 PodTemplateSpec with one more preference, unless `hostnames` is empty.

    `weight` is 1 to 100.
    """
    if not hostnames:
        return template
    spec = object_at(template, "spec")
    affinity = object_at(spec, "affinity")
    node_affinity = object_at(affinity, "nodeAffinity")
    kind = "preferredDuringSchedulingIgnoredDuringExecution"
    old_preferences = node_affinity.get(kind)
    preference: JsonObject = {
        "weight": weight,
        "preference": {
            "matchExpressions": [{"key": HOSTNAME, "operator": operator, "values": list(hostnames)}]
        },
    }
    preferences: list[JsonValue] = [
        *(old_preferences if isinstance(old_preferences, list) else ()),
        preference,
    ]
    node_affinity = {**node_affinity, kind: preferences}
    affinity = {**affinity, "nodeAffinity": node_affinity}
    return {**template, "spec": {**spec, "affinity": affinity}}


def hostnames(nodes: Mapping[str, Node] | None, node_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the label kubernetes.io/hostname of each machine: usually, not always, its name."""
    nodes_by_name = nodes or {}
    labels = (
        nodes_by_name[name].metadata.labels if name in nodes_by_name else {} for name in node_names
    )
    return tuple(
        node_labels.get(HOSTNAME) or name
        for node_labels, name in zip(labels, node_names, strict=True)
    )


def nodes_to_avoid(attempts: tuple[Attempt, ...]) -> tuple[str, ...]:
    """Return the names of the machines on which two or more of these attempts failed."""
    ends = {order_of(attempt): attempt for attempt in attempts}
    failures = Counter(
        attempt.node
        for attempt in ends.values()
        if attempt.node and attempt.reason in NODE_FAILURES
    )
    return tuple(sorted(node for node, count in failures.items() if count > MOST_FAILURES))


def nodes_with_checkpoints(job: TorchrunJob, gang: ObservedGang) -> tuple[str, ...]:
    """Return the machines of the last gang with node-local checkpoints that was scheduled whole."""
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
    """Return machines for the whole gang by the greedy rule; none where no machine can be read."""
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
