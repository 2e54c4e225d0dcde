"""Selects the workloads to preempt so that a head fits: as few as needed.

Within a queue, the lowest priority is preempted first. Priorities of different queues are not
compared, as the users of each queue set them. Among equals, the workload that loses least comes
first, see `Losses`; those that were preempted again and again come last.

Candidates are workloads of lower priority in the head's own queue. If the head stays within its
queue's own quota, workloads of queues that borrow what it lacks are candidates too, as long as they
borrow: first the quota that is short, then machines, from queues that borrow any resource that the
head requests and its queue limits. Workloads that are being preempted already count first: nothing
new is preempted for the machines that they free.
"""

import heapq
import statistics
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from torchrun_controller.reconcile.admission.node_capacity import Placement
from torchrun_controller.reconcile.admission.quota import cost_of
from torchrun_controller.reconcile.admission.reservation import Reservations
from torchrun_controller.reconcile.admission.snapshot import (
    AdmittedWorkload,
    PendingWorkload,
    Snapshot,
)

Order: TypeAlias = tuple[bool, float, float, str]
# Preemptions within a day after which others come first.
ENOUGH_PREEMPTIONS = 2


class PreemptionPlan:
    """Where a head will run, and the additional workloads to preempt for it."""

    def __init__(self, placement: Placement, targets: list[AdmittedWorkload]) -> None:
        self.placement = placement
        self.targets = targets


def plan_preemption(
    snapshot: Snapshot,
    reservations: Reservations,
    head: PendingWorkload,
    *,
    new: bool = True,
) -> PreemptionPlan | None:
    """Return the machines of a head once others have left; None if none, or if it fits already.

    With `new` False, only workloads that are being preempted already leave.
    """
    search = _Search(snapshot, reservations, head)
    try:
        fits_already = search.fits()
        for admitted in snapshot.preempted:
            search.remove(admitted)
        targets = search.targets() if new or search.fits() else None
        if fits_already or targets is None:
            return None
        return PreemptionPlan(search.capacity.place(), targets)
    finally:
        search.undo()


class _Search:
    """Removes workloads from a copy of the machines and from the quotas, which `undo` restores."""

    def __init__(
        self, snapshot: Snapshot, reservations: Reservations, head: PendingWorkload
    ) -> None:
        self.snapshot = snapshot
        self.head = head
        self.capacity = reservations.simulate(head)
        self._removed: list[AdmittedWorkload] = []

    def remove(self, admitted: AdmittedWorkload) -> None:
        self.capacity.remove(admitted)
        if admitted.queue is not None:
            admitted.queue.quota.add(admitted.usage, -1)
        self._removed.append(admitted)

    def put_back(self, admitted: AdmittedWorkload) -> None:
        assert admitted.queue is not None
        self.capacity.remove(admitted, 1)
        admitted.queue.quota.add(admitted.usage)
        self._removed.remove(admitted)

    def undo(self) -> None:
        for admitted in self._removed:
            if admitted.queue is not None:
                admitted.queue.quota.add(admitted.usage)

    def fits(self) -> bool:
        return self.head.queue.quota.shortage(self.head.usage) is None and self.capacity.fits()

    def targets(self) -> list[AdmittedWorkload] | None:
        """Return the additional workloads to preempt; None if they are not enough."""
        targets: list[AdmittedWorkload] = []
        candidates = self._candidates()
        while not self.fits():
            candidate = next(candidates, None)
            if candidate is None:
                return None
            self.remove(candidate)
            targets.append(candidate)
        # Some may be unnecessary: a later one freed everything that was missing.
        for target in reversed(targets[:-1]):
            self.put_back(target)
            if self.fits():
                targets.remove(target)
            else:
                self.remove(target)
        return targets

    def _candidates(self) -> Iterator[AdmittedWorkload]:
        queue, usage = self.head.queue, self.head.usage
        any_node = queue.quota.shortage(usage) is not None
        if not queue.quota.borrows(usage):
            yield from self._borrowers()
        priority = self.head.workload.priority
        lower_priority = [
            admitted for admitted in queue.admitted if admitted.workload.priority < priority
        ]
        losses = Losses(lower_priority)
        for admitted in sorted(lower_priority, key=losses.order_in_queue):
            if self._is_useful(admitted, any_node):
                yield admitted

    def _borrowers(self) -> Iterator[AdmittedWorkload]:
        """Yield workloads of queues that borrow what the head lacks when they are yielded."""
        quota, usage = self.head.queue.quota, self.head.usage
        for admitted in self._of_cohort():
            short = quota.shortages(usage)
            if self._is_useful(admitted, any_node=True) and _borrows(admitted, short):
                yield admitted
        shared = quota.limited(usage)
        for admitted in self._of_cohort():
            if admitted in self._removed or not self._is_useful(admitted, any_node=False):
                continue
            if _borrows(admitted, shared):
                yield admitted

    def _of_cohort(self) -> Iterator[AdmittedWorkload]:
        """Yield workloads of the other queues of the cohort, each queue in preemption order."""
        queue = self.head.queue
        queues = [q for q in self.snapshot.queues if q.quota.cohort is queue.quota.cohort]
        others = [q.admitted for q in queues if q is not queue]
        losses = Losses([admitted for workloads in others for admitted in workloads])
        ordered = [sorted(workloads, key=losses.order_in_queue) for workloads in others]
        # Compares the first workload of each queue only, so that each queue keeps its order.
        return heapq.merge(*ordered, key=losses.order)

    def _is_useful(self, admitted: AdmittedWorkload, any_node: bool) -> bool:
        members = self.head.shape.pool.members
        gives_way = admitted.gives_way and not admitted.preempted_for
        return gives_way and (any_node or not members.isdisjoint(admitted.placement))


def _borrows(admitted: AdmittedWorkload, resources: Iterable[int]) -> bool:
    """Whether the queue of the workload borrows one of these resources."""
    assert admitted.queue is not None
    return not admitted.queue.quota.borrowed().isdisjoint(resources)


class Losses:
    """What workloads lose if they stop now, and the order in which they are preempted.

    A workload loses its GPU seconds since its last checkpoint, or node seconds without GPUs. One
    that reports no checkpoint counts from its start, but no longer than the median of all: else
    those that report none would be spared.
    """

    def __init__(self, candidates: list[AdmittedWorkload]) -> None:
        ran = [admitted.workload.ran_seconds for admitted in candidates]
        self._median = statistics.median(ran) if ran else 0.0

    def order_in_queue(self, admitted: AdmittedWorkload) -> tuple[int, Order]:
        """Return the sort key within a queue: lowest priority, then as between queues."""
        return admitted.workload.priority, self.order(admitted)

    def order(self, admitted: AdmittedWorkload) -> Order:
        """Return the sort key between queues: the least loss, then the youngest."""
        workload = admitted.workload
        has_had_enough = workload.preemptions >= ENOUGH_PREEMPTIONS
        return has_had_enough, self._of(admitted), -admitted.since, workload.uid

    def _of(self, admitted: AdmittedWorkload) -> float:
        workload, seconds = admitted.workload, admitted.workload.unsaved_seconds
        if seconds is None:
            seconds = min(workload.ran_seconds, self._median)
        return seconds * cost_of(admitted.usage)
