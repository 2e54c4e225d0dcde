"""Admission over all queues at once: which job may run, which has to stop, why the rest waits.

A decision takes five steps:

1. A nominated workload is admitted as soon as the machines that it waits for are free.
2. Turns: the head of the queue whose turn it is gets admitted. The first head that does not fit
   preempts others if it may, else it gets a reservation, and the turns on its machines end.
3. Heads that lack quota preempt others for it if they may, else they wait.
4. Backfill: heads and workloads behind them are admitted where they delay no reservation.
5. Workloads that ask to grow get what is left, where they delay no reservation.

A workload that does not fit is not tried again: within one decision, free machines and quota only
shrink.
"""

from datetime import datetime
from math import inf

from msgspec.structs import replace

from torchrun_controller.reconcile.admission import messages
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    Grant,
    PendingStatus,
    Preemption,
)
from torchrun_controller.reconcile.admission.node_capacity import Placement
from torchrun_controller.reconcile.admission.preemption import PreemptionPlan, plan_preemption
from torchrun_controller.reconcile.admission.quota import usage_of
from torchrun_controller.reconcile.admission.reservation import Reservations
from torchrun_controller.reconcile.admission.snapshot import (
    AdmittedWorkload,
    PendingWorkload,
    QueueSnapshot,
    Snapshot,
    queue_order,
)
from torchrun_controller.reconcile.admission.weighted_round_robin import charge, rank

# Most grants of one decision, so that no decision takes long on an empty cluster.
MOST_GRANTS = 100
# How many jobs behind the heads of all queues are tried (Slurm's bf_max_job_test is 500).
BACKFILL = 1000
LEAST_BACKFILL = 16  # of one queue


def admit(state: ClusterState, now: datetime) -> Decisions:
    """Return what to admit and what to preempt. The order of the objects does not matter."""
    coordinator = Coordinator(state, now)
    coordinator.decide()
    return coordinator.decisions()


class Coordinator:
    """One decision in progress."""

    def __init__(self, state: ClusterState, now: datetime) -> None:
        self.now = now
        self.snapshot = Snapshot(state)
        self.reservations = Reservations(self.snapshot)
        self.active = [queue for queue in self.snapshot.queues if not queue.paused_reason]
        self.preemptions: list[Preemption] = []
        self.pending: dict[str, PendingStatus] = {}
        self.settled_uids: set[str] = set()  # admitted, nominated, or never to fit
        self._granted = 0
        # Queues whose head waits, with the seconds until it starts at the latest.
        self._waiting: dict[QueueSnapshot, float] = {}
        for queue in self.active:
            queue.head = self._first(queue)

    def decide(self) -> None:
        """Take all steps, up to MOST_GRANTS; the next call continues."""
        steps = (
            self._admit_nominated,
            self._admit_in_turn,
            self._settle_heads_without_quota,
            self._backfill,
            self._grow,
        )
        for step in steps:
            step()
            if self.full:
                return

    @property
    def full(self) -> bool:
        """Whether enough was admitted for one decision."""
        return self._granted >= MOST_GRANTS

    def decisions(self) -> Decisions:
        """Return the result, with a status for every workload that waits."""
        for queue, seconds in self._waiting.items():
            head = queue.head
            assert head is not None
            self.pending[head.workload.uid] = self._head_status(head, seconds)
        for queue in self.snapshot.queues:
            status = messages.behind_in_queue(queue)
            uids = (w.uid for w in queue.pending if w.uid not in self.settled_uids)
            for position, uid in enumerate(uids, 1):
                self.pending[uid] = replace(self.pending.get(uid, status), position=position)
        return Decisions(
            grants=tuple(self.snapshot.grants),
            preemptions=tuple(self.preemptions),
            pending=self.pending,
            queues=tuple(queue.summary() for queue in self.snapshot.queues),
            requeue_after=0.0 if self.full else self._seconds_to_next_candidate(),
        )

    def _seconds_to_next_candidate(self) -> float | None:
        """Return when a gang that has just started may be preempted; None if nobody waits."""
        seconds = (admitted.workload.protected_seconds for admitted in self.snapshot.admitted)
        return min((each for each in seconds if each > 0), default=None) if self.pending else None

    def _admit_nominated(self) -> None:
        """Admit a nominated workload that fits; preempt for one that does not fit yet."""
        for queue in self.active:
            for workload in [workload for workload in queue.pending if workload.nominated]:
                candidate = self.snapshot.pending(queue, workload)
                fits = self.snapshot.free.capacity(candidate.shape) >= candidate.workers
                if fits and queue.quota.shortage(candidate.usage) is None:
                    self._grant(candidate)
                    continue
                plan = plan_preemption(self.snapshot, self.reservations, candidate, new=False)
                if plan is not None:
                    self._nominate(candidate, plan)

    def _admit_in_turn(self) -> None:
        """Admit heads in the order of turns, until the machines they could use are reserved."""
        while not self.full:
            heads = [
                queue.head
                for queue in self.active
                if queue.head is not None
                and queue not in self._waiting
                and self.reservations.overlapping(queue.head) is None
                and queue.quota.shortage(queue.head.usage) is None
            ]
            if not heads:
                return
            head = max(heads, key=lambda head: rank(head.queue.turn, head.cost))
            if self.snapshot.free.capacity(head.shape) >= head.workers:
                self._grant(head)
            else:
                self._preempt_or_wait(head)

    def _settle_heads_without_quota(self) -> None:
        """Preempt for heads that lack quota, or let them wait."""
        for queue in self.active:
            while (head := queue.head) is not None and queue not in self._waiting:
                if queue.quota.shortage(head.usage) is None:
                    break
                self._preempt_or_wait(head)

    def _backfill(self) -> None:
        """Admit every workload that fits without delaying a head."""
        depth = max(LEAST_BACKFILL, BACKFILL // max(1, len(self.active)))
        ends = {queue: queue.next + depth for queue in self.active}
        candidates = {queue: self._advance(queue, ends[queue]) for queue in self.active}
        while not self.full:
            fitting = [candidate for candidate in candidates.values() if candidate is not None]
            if not fitting:
                return
            candidate = max(fitting, key=lambda head: rank(head.queue.turn, head.cost))
            if self._may_pass(candidate):
                self._grant(candidate)
            candidates[candidate.queue] = self._advance(candidate.queue, ends[candidate.queue])

    def _advance(self, queue: QueueSnapshot, end: int) -> PendingWorkload | None:
        """Move on to the next workload of the queue that may be admitted, and return it.

        A head that may not be admitted preempts others, or waits.
        """
        while queue.head is not None and queue.next < min(end, len(queue.pending)):
            if queue not in self._waiting:
                head = queue.head
                if self._may_pass(head):
                    return head
                self._preempt_or_wait(head)
                continue
            workload = queue.pending[queue.next]
            # A cheap check that most workloads fail.
            room = self.snapshot.free.capacity(self.snapshot.nodes.shape(workload))
            if room >= workload.workers(workload.nodes):
                candidate = self._first(queue)
                if candidate is not None and self._may_pass(candidate):
                    return candidate
            queue.next += 1
        return None

    def _grow(self) -> None:
        """Admit more nodes for workloads that ask to grow."""
        growing_workloads = [
            (admitted.workload, queue)
            for queue in self.active
            for admitted in queue.admitted
            if admitted.workload.nodes > admitted.workload.admitted and not admitted.preempted_for
        ]
        for workload, queue in sorted(growing_workloads, key=lambda pair: queue_order(pair[0])):
            candidate = self.snapshot.pending(queue, workload)
            if self._is_impossible(candidate):
                continue
            if self._may_pass(candidate):
                self._grant(candidate)
                continue
            self.pending[workload.uid] = messages.waiting_to_grow(candidate, self.snapshot)

    def _first(self, queue: QueueSnapshot) -> PendingWorkload | None:
        """Return the first workload that is not settled, from the queue's position on."""
        while queue.next < len(queue.pending):
            workload = queue.pending[queue.next]
            if workload.uid not in self.settled_uids:
                candidate = self.snapshot.pending(queue, workload)
                if not self._is_impossible(candidate):
                    return candidate
            queue.next += 1
        return None

    def _is_impossible(self, candidate: PendingWorkload) -> bool:
        """Whether the workload would not fit even on an empty cluster; it then delays no other.

        One that fits if all machines are usable keeps its position.
        """
        workload, snapshot = candidate.workload, self.snapshot
        workers = workload.workers(workload.nodes)
        resource = candidate.queue.quota.exceeded(usage_of(workload, workload.nodes))
        if resource is not None:
            status = messages.exceeds_quota(candidate, resource)
        elif snapshot.empty.capacity(candidate.shape) >= workers:
            return False
        elif snapshot.nodes.capacity_of_all(candidate.shape) < workers:
            status = messages.exceeds_nodes(candidate, snapshot.empty)
        else:
            status = messages.waiting_for_unusable_nodes(candidate, snapshot.empty)
        self.pending[workload.uid] = status
        if status.reason != "WaitingForNodes":
            self.settled_uids.add(workload.uid)
        return True

    def _may_pass(self, candidate: PendingWorkload) -> bool:
        """Whether the workload fits, by quota and by machines, and delays no head."""
        room = self.reservations.available(candidate).capacity(candidate.shape)
        has_quota = candidate.queue.quota.shortage(candidate.usage) is None
        return has_quota and room >= candidate.workers

    def _wait(self, head: PendingWorkload) -> None:
        """Let the head wait for what it lacks.

        If that is machines, it gets a reservation, unless its machines have one. From then on,
        workloads behind it are admitted only where they do not delay it.
        """
        queue, seconds = head.queue, inf
        has_quota = queue.quota.shortage(head.usage) is None
        if has_quota and self.reservations.overlapping(head) is None:
            seconds = self.reservations.reserve(head).seconds
        self._waiting[queue] = seconds
        queue.next += 1

    def _head_status(self, head: PendingWorkload, seconds: float) -> PendingStatus:
        """Return what a waiting head lacks. It starts in `seconds` at the latest."""
        resource = head.queue.quota.shortage(head.usage)
        if resource is not None:
            return messages.insufficient_quota(head, resource)
        reservation, free = self.reservations.overlapping(head), self.snapshot.free
        if reservation is not None and free.capacity(head.shape) >= head.workers:
            return messages.waiting_for_turn(head, reservation.head)
        latest_start = messages.describe_latest_start(self.now, seconds)
        return messages.waiting_for_nodes(head, self.snapshot, latest_start)

    def _preempt_or_wait(self, head: PendingWorkload) -> None:
        """Preempt others for the head, or let it wait."""
        plan = plan_preemption(self.snapshot, self.reservations, head)
        if plan is None:
            self._wait(head)
        else:
            self._nominate(head, plan)

    def _nominate(self, candidate: PendingWorkload, plan: PreemptionPlan) -> None:
        """Reserve the machines of preempted workloads. They are free once the pods have stopped."""
        preempted_workloads = self.snapshot.preempted
        for target in plan.targets:
            target.preempt(candidate.workload.uid)
            preempted_workloads.append(target)
            self.preemptions.append(messages.explain_preemption(target, candidate))
        self.reservations.promise(candidate, plan.placement, preempted_workloads)
        candidate.queue.quota.promise(candidate.usage)
        self._settle(candidate, plan.placement)
        self.pending[candidate.workload.uid] = messages.preempting(candidate, preempted_workloads)

    def _grant(self, candidate: PendingWorkload) -> None:
        """Admit the workload now."""
        workload, free = candidate.workload, self.reservations.available(candidate)
        placement = free.place(candidate.shape, candidate.workers)
        self._charge(candidate)
        self.reservations.take(candidate, placement)
        self._granted += 1
        nodes = self.snapshot.nodes.nodes
        names = {nodes[i].name: pods for i, pods in sorted(placement.items())}
        self.snapshot.grants.append(Grant(uid=workload.uid, nodes=workload.nodes, placement=names))
        candidate.queue.granted += not workload.admitted
        candidate.queue.quota.add(candidate.usage)
        self._settle(candidate, placement)

    def _settle(self, candidate: PendingWorkload, placement: Placement) -> None:
        """Count a workload that is admitted or nominated, and take the next head of its queue."""
        queue, workload = candidate.queue, candidate.workload
        since = self.now.timestamp()
        self.snapshot.admitted.append(
            AdmittedWorkload(queue, workload, candidate.shape, placement, candidate.usage, since)
        )
        self.settled_uids.add(workload.uid)
        if queue not in self._waiting:
            queue.head = self._first(queue)

    def _charge(self, candidate: PendingWorkload) -> None:
        """Charge the round robin among the queues that could have used the same machines."""
        rivals = [
            queue
            for queue in self.active
            if queue is candidate.queue
            or (
                queue.head is not None
                and self.snapshot.overlap(queue.head.shape, candidate.shape)
                and queue.quota.shortage(queue.head.usage) is None
            )
        ]
        charge(candidate.queue.turn, candidate.cost, [queue.turn for queue in rivals])
