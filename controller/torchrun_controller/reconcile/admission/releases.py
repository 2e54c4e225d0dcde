"""Selects the shrunk gangs that release the nodes they do not use.

A shrunk gang grows into its admission without asking, wherever it finds room. So this room is not
free: a head that needs it waits until the gangs have reported that they give it up.
"""

from torchrun_controller.reconcile.admission.node_capacity import Placement
from torchrun_controller.reconcile.admission.preemption import youngest_first
from torchrun_controller.reconcile.admission.reservation import Reservations
from torchrun_controller.reconcile.admission.snapshot import PendingWorkload, Snapshot


def releases_of_room(
    snapshot: Snapshot, reservations: Reservations, head: PendingWorkload
) -> dict[str, int]:
    """Return the nodes that gangs keep, by UID, if the head fits into what they release.

    Empty if that is not enough, or if the head does not lack room.
    """
    members = head.shape.pool.members
    shrunk = [
        (admitted, nodes)
        for admitted in snapshot.admitted
        if (nodes := admitted.kept_nodes) is not None and not members.isdisjoint(admitted.unused)
    ]
    if not shrunk or head.queue.quota.shortage(head.usage) is not None:
        return {}
    capacity = reservations.simulate(head)
    releases: dict[str, int] = {}
    for admitted, nodes in sorted(shrunk, key=lambda pair: youngest_first(pair[0])):
        if capacity.fits():
            break
        capacity.release(admitted)
        releases[admitted.workload.uid] = nodes
    return releases if capacity.fits() else {}


def releases_beside(snapshot: Snapshot, placement: Placement) -> dict[str, int]:
    """Return the nodes that gangs keep that would take these nodes as soon as others leave them."""
    return {
        admitted.workload.uid: nodes
        for admitted in snapshot.admitted
        if (nodes := admitted.kept_nodes) is not None
        and admitted.homeless
        and not admitted.shape.pool.members.isdisjoint(placement)
    }
