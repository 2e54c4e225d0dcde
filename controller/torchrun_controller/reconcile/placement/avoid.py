"""Nodes that failed a gang twice are taken last by the next one."""

from collections import Counter

from torchrun_api.status import Attempt
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.placement.affinity import HOSTNAME

ENOUGH = 2
# Failures that may be the machine's fault: it was lost, its kubelet ended the pod, storage did not
# answer there, or a signal ended the rank (a GPU that has fallen off ends its process by a signal).
# Not an exception, an exit code or the job's own memory limit: these follow the job wherever it
# runs. Not preemption, drain and deletion either: these say nothing of the machine.
OF_THE_NODE = frozenset(
    {
        "NodeLost",
        "Evicted",
        "TerminationByKubelet",
        "DeletionByTaintManager",
        "Fenced",
        "Signaled",
        "Signal",
    }
)


def failed_twice(attempts: tuple[Attempt, ...]) -> tuple[str, ...]:
    """Names of the nodes on which two or more of these attempts failed, each attempt once."""
    by_number = {attempt.number: attempt for attempt in attempts}
    failures = Counter(
        attempt.node
        for attempt in by_number.values()
        if attempt.node and attempt.reason in OF_THE_NODE
    )
    return tuple(sorted(node for node, count in failures.items() if count >= ENOUGH))


def hostnames(observed: Observed, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Their label kubernetes.io/hostname, which is mostly but not always the name."""
    known = observed.cluster.nodes or {}
    labels = (known[name].metadata.labels if name in known else {} for name in nodes)
    return tuple(of.get(HOSTNAME) or name for of, name in zip(labels, nodes, strict=True))
