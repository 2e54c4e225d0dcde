"""Reservations for heads that wait, and the workloads that may start before them (EASY backfill).

A reservation is where the head fits, and when at the latest. Admitted workloads are assumed to
end in the order of their deadlines; those without a deadline follow, the oldest first. A workload
may pass the head if it ends before that time, or uses only what the head leaves: no backfill delays
the head. If a workload without a deadline has to end first, the time is unknown, and only what the
head leaves is used. The oldest workloads are expected to end first, so newer ones do not delay the
head.
"""

from collections.abc import Collection, Iterable
from math import inf

from torchrun_controller.reconcile.admission.node_capacity import FreeCapacity, Placement
from torchrun_controller.reconcile.admission.snapshot import (
    AdmittedWorkload,
    PendingWorkload,
    Snapshot,
)


class Reservation:
    """Machines for one head, in `seconds` from now at the latest; inf if the time is unknown."""

    def __init__(self, head: PendingWorkload, seconds: float) -> None:
        self.head = head
        self.seconds = seconds


class Reservations:
    """All machine reservations of one decision.

    They track what is free now, and what is free later, when every head runs on its reservation. A
    workload that does not end before the reservations has to fit into both.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._reservations: list[Reservation] = []
        self._later: FreeCapacity | None = None
        self._both: FreeCapacity | None = None
        # UIDs of the workloads that occupy nothing in `_later`.
        self._ended_uids: set[str] = set()

    def overlapping(self, workload: PendingWorkload) -> Reservation | None:
        """Return the first reservation of machines that the workload could use."""
        overlap = self._snapshot.overlap
        return next((r for r in self._reservations if overlap(r.head.shape, workload.shape)), None)

    def reserve(self, head: PendingWorkload) -> Reservation:
        """Reserve machines for a head that fits on an empty cluster, but not now.

        There must be no other reservation on machines that it could use.
        """
        later, ending, seconds = self._wait_for_nodes(head)
        self._ended_uids.update(admitted.workload.uid for admitted in ending)
        later.take(head.shape, later.place(head.shape, head.workers))
        self._later = later
        self._both = self._snapshot.free.least(later)
        reservation = Reservation(head, seconds)
        self._reservations.append(reservation)
        return reservation

    def _wait_for_nodes(
        self, head: PendingWorkload
    ) -> tuple[FreeCapacity, list[AdmittedWorkload], float]:
        """Return what is free once the head fits, the workloads that end first, and the time."""
        later = (self._later or self._snapshot.free).copy(head.shape)
        members = head.shape.pool.members
        overlapping_workloads = [
            admitted
            for admitted in self._snapshot.admitted
            if not members.isdisjoint(admitted.placement)
        ]
        # Some of them end for another head, on machines that both could use.
        delays = [
            admitted.seconds
            for admitted in overlapping_workloads
            if admitted.workload.uid in self._ended_uids
        ]
        ending: list[AdmittedWorkload] = []
        for admitted in sorted(overlapping_workloads, key=lambda admitted: admitted.end_order):
            if later.capacity(head.shape) >= head.workers:
                break
            if admitted.workload.uid not in self._ended_uids:
                later.take(admitted.shape, admitted.placement, -1)
                ending.append(admitted)
                delays.append(admitted.seconds)
        return later, ending, max(delays, default=inf)

    def available(self, workload: PendingWorkload) -> FreeCapacity:
        """Return what the workload may use without delaying a head."""
        if self._both is None or self._ends_before(workload):
            return self._snapshot.free
        return self._both

    def simulate(self, workload: PendingWorkload) -> "CapacitySimulation":
        """Return a copy of that, to see what a preemption would free."""
        free = self._snapshot.free
        if self._later is None or self._both is None or self._ends_before(workload):
            return CapacitySimulation(workload, free, None, free, self._ended_uids)
        return CapacitySimulation(workload, free, self._later, self._both, self._ended_uids)

    def take(self, workload: PendingWorkload, placement: Placement) -> None:
        """Count a workload that is admitted on these machines."""
        self._snapshot.free.take(workload.shape, placement)
        if self._later is not None:
            if self._ends_before(workload):
                self._ended_uids.add(workload.workload.uid)
            else:
                self._later.take(workload.shape, placement)
            self._update(placement)

    def promise(
        self,
        head: PendingWorkload,
        placement: Placement,
        preempted_workloads: list[AdmittedWorkload],
    ) -> None:
        """Count the machines for the head; the preempted workloads leave them first."""
        self._snapshot.free.take(head.shape, placement)
        if self._later is not None:
            for admitted in preempted_workloads:
                if admitted.workload.uid not in self._ended_uids:
                    self._ended_uids.add(admitted.workload.uid)
                    self._later.take(admitted.shape, admitted.placement, -1)
                    self._update(admitted.placement)
            self._later.take(head.shape, placement)
            self._update(placement)

    def _update(self, nodes: Iterable[int]) -> None:
        assert self._later is not None
        assert self._both is not None
        for i in nodes:
            self._both.set(i, tuple(map(min, self._snapshot.free.free[i], self._later.free[i])))

    def _ends_before(self, workload: PendingWorkload) -> bool:
        """Whether the workload ends before any reservation on machines that it could use."""
        overlap = self._snapshot.overlap
        overlapping_reservations = [
            r for r in self._reservations if overlap(r.head.shape, workload.shape)
        ]
        return bool(overlapping_reservations) and all(
            workload.seconds <= r.seconds < inf for r in overlapping_reservations
        )


class CapacitySimulation:
    """What a workload could use if admitted workloads left; all reservations stay."""

    def __init__(
        self,
        workload: PendingWorkload,
        free_now: FreeCapacity,
        free_later: FreeCapacity | None,
        free_in_both: FreeCapacity,
        ended_uids: Collection[str],
    ) -> None:
        self._workload = workload
        self._now = free_now.copy(workload.shape)
        self._later = free_later and free_later.copy(workload.shape)
        self._both = self._now if free_later is None else free_in_both.copy(workload.shape)
        self._ended_uids = ended_uids

    def remove(self, admitted: AdmittedWorkload, times: int = -1) -> None:
        """Remove the workload; `times` 1 restores it."""
        placement = admitted.placement
        self._now.take(admitted.shape, placement, times)
        if self._later is not None:
            if admitted.workload.uid not in self._ended_uids:
                self._later.take(admitted.shape, placement, times)
            for i in placement:
                self._both.set(i, tuple(map(min, self._now.free[i], self._later.free[i])))

    def fits(self) -> bool:
        """Whether the workload fits."""
        return self._both.capacity(self._workload.shape) >= self._workload.workers

    def place(self) -> Placement:
        """Return machines for the workload."""
        return self._both.place(self._workload.shape, self._workload.workers)
