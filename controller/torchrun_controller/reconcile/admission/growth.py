"""Keeps what waiting heads could use from gangs that ask to grow.

A gang that has returned nodes for a head asks for them again at once. If it got them while the head
still waits, as for a second gang, it would have to return them again, without end.
"""

from collections.abc import Iterable

from torchrun_controller.reconcile.admission.snapshot import PendingWorkload, Snapshot


def could_serve_a_head(
    snapshot: Snapshot, growth: PendingWorkload, heads: Iterable[PendingWorkload]
) -> bool:
    """Whether one of the heads could use the quota or the nodes that the growth takes."""
    return any(_takes_quota(growth, head) or _takes_nodes(snapshot, growth, head) for head in heads)


def _takes_quota(growth: PendingWorkload, head: PendingWorkload) -> bool:
    """Whether a resource that both share does not suffice for both."""
    quota, cohort = growth.queue.quota, head.queue.quota.cohort
    if quota.cohort is not cohort:
        return False
    shared = set(quota.limited(growth.usage)).intersection(head.queue.quota.limited(head.usage))
    return any(
        cohort.used[resource] + growth.usage[resource] + head.usage[resource]
        > cohort.limit[resource]
        for resource in shared
    )


def _takes_nodes(snapshot: Snapshot, growth: PendingWorkload, head: PendingWorkload) -> bool:
    """Whether the head could run on the same nodes, unless it lacks quota.

    A head that preempts others for quota may need room that gangs release before.
    """
    lacks_only_nodes = head.queue.quota.shortage(head.usage) is None
    needs_nodes = lacks_only_nodes or head.awaits_release
    return needs_nodes and snapshot.overlap(growth.shape, head.shape)
