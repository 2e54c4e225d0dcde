"""The coordinator with one mechanism disabled, for comparison."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_bench.admission.simulation import GPU, Decide
from torchrun_controller.reconcile.admission.coordinator import Coordinator, admit
from torchrun_controller.reconcile.admission.model import ClusterState, Decisions, QuotaLimits
from torchrun_controller.reconcile.admission.reservation import QuotaReservation
from torchrun_controller.reconcile.admission.snapshot import PendingWorkload, QueueSnapshot


class _NoQuota(QuotaReservation):
    def allows(self, workload: PendingWorkload) -> bool:
        return True


class WithoutReservation(Coordinator):
    """A job at the head that does not fit reserves neither nodes nor quota: others pass it."""

    def _wait(self, head: PendingWorkload) -> None:
        self._waiting[head.queue] = _NoQuota(self.snapshot, head)
        head.queue.next += 1


class WithoutQuotaReservation(Coordinator):
    """A waiting head reserves nodes, but no quota."""

    def _wait(self, head: PendingWorkload) -> None:
        super()._wait(head)
        self._waiting[head.queue] = _NoQuota(self.snapshot, head)


class WithoutBackfill(Coordinator):
    """No workload passes a waiting head, neither in its queue nor on its nodes."""

    def _backfill(self) -> None:
        for queue in self.active:
            while (head := queue.head) is not None and queue not in self._waiting:
                if self._may_pass(head):
                    self._grant(head, in_turn=True)
                else:
                    self._preempt_or_wait(head)


class WithoutLender(Coordinator):
    """A queue borrows while a lender waits for its own quota."""

    def _lender(self, candidate: PendingWorkload) -> QueueSnapshot | None:
        return None


class OneRoundRobin(Coordinator):
    """Backfilled workloads are charged to the round robin like all others."""

    def __init__(self, state: ClusterState, now: datetime) -> None:
        super().__init__(state, now)
        for queue in self.active:
            queue.spare = queue.turn

    def _charge(self, candidate: PendingWorkload, in_turn: bool) -> None:
        super()._charge(candidate, in_turn=False)


def _decide_with(kind: type[Coordinator]) -> Decide:
    def decide(state: ClusterState, now: datetime) -> Decisions:
        coordinator = kind(state, now)
        coordinator.decide()
        return coordinator.decisions()

    return decide


def without_nodes(state: ClusterState, now: datetime) -> Decisions:
    """Quota only. Queues without one get their share of all GPUs in one cohort."""
    assert state.nodes is not None
    gpus = sum(node.allocatable[GPU] for node in state.nodes)
    weights = sum(queue.weight or 1 for queue in state.queues)
    queues = tuple(
        queue
        if queue.cohort
        else replace(
            queue, cohort="all", quota=QuotaLimits(gpus=gpus * (queue.weight or 1) // weights)
        )
        for queue in state.queues
    )
    return admit(replace(state, nodes=None, queues=queues), now)


def without_selectors(state: ClusterState, now: datetime) -> Decisions:
    """Room on any node; ignores node selectors."""
    workloads = tuple(replace(workload, node_selector={}) for workload in state.workloads)
    return admit(replace(state, workloads=workloads), now)


def without_deadlines(state: ClusterState, now: datetime) -> Decisions:
    """Backfill only beside a reservation, never before it."""
    workloads = tuple(replace(workload, seconds_left=None) for workload in state.workloads)
    return admit(replace(state, workloads=workloads), now)


SPREAD = "a scheduler that packs pods"

# Each mechanism with the decision that lacks it.
VARIANTS: dict[str, Decide] = {
    "nothing": admit,
    "node room": without_nodes,
    "node selectors and taints": without_selectors,
    "reservations": _decide_with(WithoutReservation),
    "reservation of quota": _decide_with(WithoutQuotaReservation),
    "backfill": _decide_with(WithoutBackfill),
    "deadlines in backfill": without_deadlines,
    "second round robin": _decide_with(OneRoundRobin),
    "lender first": _decide_with(WithoutLender),
    SPREAD: admit,
}
