"""The next gang avoids nodes on which two attempts failed."""

from collections import Counter

from torchrun_api.status import Attempt
from torchrun_controller.reconcile.model.attempts import order_of

MOST_FAILURES = 1  # of a node that is not avoided
# Failures that the machine may have caused: the node was lost or restarted, its kubelet ended the
# pod, storage did not answer, or a signal ended the rank (as when a GPU has fallen off the bus).
# An exception, an exit code and the job's own limits of memory and storage (Evicted without a
# disruption) would occur on any node. Preemption, drain and deletion have other causes.
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


def nodes_to_avoid(attempts: tuple[Attempt, ...]) -> tuple[str, ...]:
    """Return the names of the nodes on which two or more of these attempts failed."""
    ends = {order_of(attempt): attempt for attempt in attempts}
    failures = Counter(
        attempt.node
        for attempt in ends.values()
        if attempt.node and attempt.reason in NODE_FAILURES
    )
    return tuple(sorted(node for node, count in failures.items() if count > MOST_FAILURES))
