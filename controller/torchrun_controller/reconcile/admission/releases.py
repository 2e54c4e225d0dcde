"""Selects the shrunk gangs that release the nodes they do not use.

A shrunk gang grows into its admission without asking, wherever it finds room. So this room is not
free: a head that needs it waits until the gangs have reported that they give it up.
"""

from torchrun_controller.reconcile.admission.node_capacity import Placement
from torchrun_controller.reconcile.admission.preemption import (
    PreemptionPlan,
    plan_preemption,
    youngest_first,
)
from torchrun_controller.reconcile.admission.reservation import Reservations
from torchrun_controller.reconcile.admission.snapshot import (
    AdmittedWorkload,
    PendingWorkload,
    Snapshot,
)

Releases = dict[str, int]  # the nodes that gangs keep, by UID


def make_room(
    snapshot: Snapshot, reservations: Reservations, head: PendingWorkload
) -> tuple[Releases, PreemptionPlan | None]:
    """Return the releases that a head needs, or what it preempts.

    If it needs both, the releases come first: the nodes are free for it when it preempts others.
    """
    releases = _releases_of_room(snapshot, reservations, head)
    plan = None if releases else plan_preemption(snapshot, reservations, head)
    if not releases and plan is None:
        later = _plan_with_releases(snapshot, reservations, head)
        releases = {} if later is None else later.releases
    return releases, plan


def keep_nomination(
    snapshot: Snapshot, reservations: Reservations, nominated: PendingWorkload
) -> PreemptionPlan | None:
    """Return the nodes that a nominated workload still waits for, and the releases that it needs.

    A gang may grow onto the nodes that a preempted one has left.
    """
    plan = plan_preemption(snapshot, reservations, nominated, new=False)
    return plan or _plan_with_releases(snapshot, reservations, nominated, new=False)


def _releases_of_room(
    snapshot: Snapshot, reservations: Reservations, head: PendingWorkload
) -> Releases:
    """Return the releases of the youngest gangs, if the head fits into what they release.

    Empty if that is not enough, or if the head does not lack room.
    """
    shrunk = _shrunk(snapshot, head)
    if not shrunk or head.queue.quota.shortage(head.usage) is not None:
        return {}
    capacity = reservations.simulate(head)
    releases: Releases = {}
    for admitted, nodes in sorted(shrunk, key=lambda pair: youngest_first(pair[0])):
        if capacity.fits():
            break
        capacity.release(admitted)
        releases[admitted.workload.uid] = nodes
    return releases if capacity.fits() else {}


def _plan_with_releases(
    snapshot: Snapshot, reservations: Reservations, head: PendingWorkload, *, new: bool = True
) -> PreemptionPlan | None:
    """Return a plan that counts on releases, with those on its nodes."""
    shrunk = _shrunk(snapshot, head)
    if not shrunk:
        return None
    releasing = [admitted for admitted, _ in shrunk]
    plan = plan_preemption(snapshot, reservations, head, new=new, releasing=releasing)
    if plan is not None:
        plan.releases = {
            admitted.workload.uid: nodes
            for admitted, nodes in shrunk
            if not plan.placement.keys().isdisjoint(admitted.unused)
        }
    return plan


def _shrunk(snapshot: Snapshot, head: PendingWorkload) -> list[tuple[AdmittedWorkload, int]]:
    """Return the gangs with unused room on nodes that the head could use, and what they keep."""
    members = head.shape.pool.members
    return [
        (admitted, nodes)
        for admitted in snapshot.admitted
        if (nodes := admitted.kept_nodes) is not None and not members.isdisjoint(admitted.unused)
    ]


def releases_beside(snapshot: Snapshot, placement: Placement) -> Releases:
    """Return the releases of gangs that would take these nodes as soon as others leave them."""
    return {
        admitted.workload.uid: nodes
        for admitted in snapshot.admitted
        if (nodes := admitted.kept_nodes) is not None
        and admitted.homeless
        and not admitted.shape.pool.members.isdisjoint(placement)
    }
