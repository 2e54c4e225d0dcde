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
    """Whether the head lacks no quota, and could run on the same nodes."""
    lacks_quota = head.queue.quota.shortage(head.usage) is not None
    return not lacks_quota and snapshot.overlap(growth.shape, head.shape)
