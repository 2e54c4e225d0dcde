"""Admission over all queues at once: which job may run, which has to stop, why the rest waits.

A decision takes five steps:

1. A nominated workload is admitted as soon as the nodes that it waits for are free.
2. Turns: the head of the queue whose turn it is gets admitted. The first head that does not fit
   preempts others if it may, else it gets a reservation, and the turns on its nodes end.
3. Heads that lack quota preempt others if they may, else they wait.
4. Backfill: heads and workloads behind them are admitted where they delay no reservation. The queue
   that got least for its weight comes first.
5. Workloads that ask to grow get what is left.

A workload that does not fit is not tried again: within one decision, free nodes and quota only
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
    Release,
)
from torchrun_controller.reconcile.admission.node_capacity import Placement
from torchrun_controller.reconcile.admission.preemption import PreemptionPlan, plan_preemption
from torchrun_controller.reconcile.admission.quota import Cohort, Usage, usage_of
from torchrun_controller.reconcile.admission.reservation import QuotaReservation, Reservations
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
    """Return what to admit, preempt and release. The order of the objects does not matter."""
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
        self.releases: dict[str, int] = {}
        self.settled: set[str] = set()  # admitted, nominated, or never to fit
        self._granted = 0
        # Queues whose head waits, with the quota that is reserved for it.
        self._waiting: dict[QueueSnapshot, QuotaReservation] = {}
        self._cohorts: dict[Cohort, list[QueueSnapshot]] = {}
        for queue in self.active:
            self._cohorts.setdefault(queue.quota.cohort, []).append(queue)
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
        for queue, reserved in self._waiting.items():
            assert queue.head is not None
            self.pending[queue.head.workload.uid] = self._head_status(queue.head, reserved.seconds)
        for queue in self.snapshot.queues:
            status = messages.behind_in_queue(queue)
            waiting = (one.uid for one in queue.pending if one.uid not in self.settled)
            for position, uid in enumerate(waiting, 1):
                self.pending[uid] = replace(self.pending.get(uid, status), position=position)
        return Decisions(
            grants=tuple(self.snapshot.grants),
            preemptions=tuple(self.preemptions),
            releases=tuple(
                Release(uid=uid, nodes=nodes) for uid, nodes in sorted(self.releases.items())
            ),
            pending=self.pending,
            queues=tuple(queue.summary() for queue in self.snapshot.queues),
            requeue_after=0.0 if self.full else None,
        )

    def _admit_nominated(self) -> None:
        """Admit a nominated workload that fits; preempt for one that does not fit yet."""
        for queue in self.active:
            for one in [one for one in queue.pending if one.nominated]:
                workload = self.snapshot.pending(queue, one)
                fits = self.snapshot.free.capacity(workload.shape) >= workload.workers
                if fits and queue.quota.shortage(workload.usage) is None:
                    self._grant(workload, in_turn=True)
                    continue
                plan = plan_preemption(self.snapshot, self.reservations, workload, new=False)
                if plan is not None:
                    self._nominate(workload, plan)

    def _admit_in_turn(self) -> None:
        """Admit heads in the order of turns, until the nodes they could use are reserved."""
        while not self.full:
            able = [
                queue.head
                for queue in self.active
                if queue.head is not None
                and queue not in self._waiting
                and self.reservations.overlapping(queue.head) is None
                and queue.quota.shortage(queue.head.usage) is None
                and self._lender(queue.head) is None
            ]
            if not able:
                return
            head = max(able, key=lambda head: rank(head.queue.turn, head.cost))
            if self.snapshot.free.capacity(head.shape) >= head.workers:
                self._grant(head, in_turn=True)
            elif not self._preempt(head):
                self._wait(head)

    def _settle_heads_without_quota(self) -> None:
        """Preempt for heads that lack quota, or let them wait; a lender comes before a borrower."""
        for queue in self.active:
            while (head := queue.head) is not None and queue not in self._waiting:
                lacks_quota = queue.quota.shortage(head.usage) is not None
                if not lacks_quota and self._lender(head) is None:
                    break
                released = lacks_quota and self._release_unused(head)
                if not lacks_quota or released or not self._preempt(head):
                    self._wait(head)

    def _release_unused(self, head: PendingWorkload) -> bool:
        """Let shrunk gangs of the cohort release the nodes they do not use, if that is enough.

        The quota stays charged until reconcile has released them.
        """
        quota = head.queue.quota
        released: list[tuple[AdmittedWorkload, QueueSnapshot, int, Usage]] = []
        for queue in self._cohorts[quota.cohort]:
            for admitted in queue.admitted:
                uses = admitted.workload.shrunk_to
                if quota.shortage(head.usage) is None:
                    break
                if uses is None or admitted.preempted_for:
                    continue
                usage = usage_of(admitted.workload, admitted.workload.admitted - uses, 0)
                queue.quota.add(usage, -1)
                released.append((admitted, queue, uses, usage))
        enough = quota.shortage(head.usage) is None
        for admitted, queue, uses, usage in released:
            queue.quota.add(usage)
            if enough:
                self.releases[admitted.workload.uid] = uses
        return enough

    def _backfill(self) -> None:
        """Admit every workload that fits without delaying a head."""
        depth = max(LEAST_BACKFILL, BACKFILL // max(1, len(self.active)))
        ends = {queue: queue.next + depth for queue in self.active}
        candidates = {queue: self._next(queue, ends[queue]) for queue in self.active}
        while not self.full:
            fitting = [one for one in candidates.values() if one is not None]
            if not fitting:
                return
            workload = max(fitting, key=lambda one: rank(one.queue.spare, one.cost))
            if self._may_pass(workload):
                self._grant(workload)
            candidates[workload.queue] = self._next(workload.queue, ends[workload.queue])

    def _next(self, queue: QueueSnapshot, end: int) -> PendingWorkload | None:
        """Return the next workload of the queue that may be admitted; let its head wait if not."""
        while queue.head is not None and queue.next < min(end, len(queue.pending)):
            if queue not in self._waiting:
                head = queue.head
                if self._may_pass(head):
                    return head
                if not self._preempt(head):
                    self._wait(head)
                continue
            one = queue.pending[queue.next]
            # A cheap check that most workloads fail.
            room = self.snapshot.free.capacity(self.snapshot.nodes.shape(one))
            if room >= one.workers(one.nodes):
                workload = self._first(queue)
                if workload is not None and self._may_pass(workload):
                    return workload
            queue.next += 1
        return None

    def _grow(self) -> None:
        """Admit more nodes for workloads that ask to grow."""
        growing = [
            (admitted.workload, queue)
            for queue in self.active
            for admitted in queue.admitted
            if admitted.workload.nodes > admitted.workload.admitted and not admitted.preempted_for
        ]
        for one, queue in sorted(growing, key=lambda pair: queue_order(pair[0])):
            workload = self.snapshot.pending(queue, one)
            if self._is_impossible(workload):
                continue
            if self._may_pass(workload):
                self._grant(workload)
                continue
            resource = queue.quota.shortage(workload.usage)
            free = self.snapshot.free
            if resource is not None:
                status = messages.insufficient_quota(workload, resource)
            elif free.capacity(workload.shape) >= workload.workers:
                status = messages.waiting_for_turn(workload)
            else:
                status = messages.waiting_for_nodes(workload, free)
            self.pending[one.uid] = status

    def _first(self, queue: QueueSnapshot) -> PendingWorkload | None:
        """Return the first workload that is not settled, from the queue's position on."""
        while queue.next < len(queue.pending):
            one = queue.pending[queue.next]
            if one.uid not in self.settled:
                workload = self.snapshot.pending(queue, one)
                if not self._is_impossible(workload):
                    return workload
            queue.next += 1
        return None

    def _is_impossible(self, workload: PendingWorkload) -> bool:
        """Whether the workload would not fit even on an empty cluster; it then delays no other."""
        one = workload.workload
        resource = workload.queue.quota.exceeded(usage_of(one, one.nodes))
        if resource is not None:
            self.pending[one.uid] = messages.exceeds_quota(workload, resource)
        elif self.snapshot.empty.capacity(workload.shape) < one.workers(one.nodes):
            self.pending[one.uid] = messages.exceeds_nodes(workload, self.snapshot.empty)
        else:
            return False
        self.settled.add(one.uid)
        return True

    def _may_pass(self, workload: PendingWorkload) -> bool:
        """Whether the workload fits, by quota and by nodes, and delays no head."""
        queue = workload.queue
        reserved = self._waiting.get(queue)
        return (
            self.reservations.available(workload).capacity(workload.shape) >= workload.workers
            and queue.quota.shortage(workload.usage) is None
            and (reserved is None or reserved.allows(workload))
            and self._lender(workload) is None
        )

    def _lender(self, workload: PendingWorkload) -> QueueSnapshot | None:
        """Return a queue that waits for its own quota, which the workload would borrow.

        A queue with a reservation does not count: the reservation protects its head.
        """
        queues = self._cohorts[workload.queue.quota.cohort]
        if len(queues) == 1 or not workload.queue.quota.borrows(workload.usage):
            return None
        for queue in queues:
            head = queue.head
            if head is None or queue is workload.queue or queue.quota.borrows(head.usage):
                continue
            overlap = self.snapshot.overlap(head.shape, workload.shape)
            if overlap and not self.reservations.has(head):
                return queue
        return None

    def _wait(self, head: PendingWorkload) -> None:
        """Let the head wait for what it lacks, with a reservation if its nodes have none yet.

        From now on, workloads behind it are admitted only where they do not delay it.
        """
        queue, seconds = head.queue, inf
        if (
            queue.quota.shortage(head.usage) is None
            and self._lender(head) is None
            and self.reservations.overlapping(head) is None
        ):
            seconds = self.reservations.reserve(head).seconds
        self._waiting[queue] = QuotaReservation(self.snapshot, head, seconds)
        queue.next += 1

    def _head_status(self, head: PendingWorkload, seconds: float) -> PendingStatus:
        """Return what a waiting head lacks. It starts in `seconds` at the latest."""
        latest_start = messages.describe_latest_start(self.now, seconds)
        resource = head.queue.quota.shortage(head.usage)
        if resource is not None:
            return messages.insufficient_quota(head, resource, latest_start)
        lender = self._lender(head)
        if lender is not None:
            return messages.waiting_for_lender(head, lender)
        first, free = self.reservations.overlapping(head), self.snapshot.free
        if first is not None and free.capacity(head.shape) >= head.workers:
            return messages.waiting_for_turn(head, first.head)
        return messages.waiting_for_nodes(head, free, latest_start)

    def _preempt(self, head: PendingWorkload) -> bool:
        plan = plan_preemption(self.snapshot, self.reservations, head)
        if plan is None:
            return False
        self._nominate(head, plan)
        return True

    def _nominate(self, workload: PendingWorkload, plan: PreemptionPlan) -> None:
        """Reserve the nodes of preempted workloads, which are free once their pods have stopped."""
        preempted = self.snapshot.preempted
        for target in plan.targets:
            target.preempt(workload.workload.uid)
            preempted.append(target)
            self.preemptions.append(messages.explain_preemption(target, workload))
        self.reservations.promise(workload, plan.placement, preempted)
        self._settle(workload, plan.placement)
        self.pending[workload.workload.uid] = messages.preempting(workload, preempted)

    def _grant(self, workload: PendingWorkload, *, in_turn: bool = False) -> None:
        """Admit the workload now."""
        one, free = workload.workload, self.reservations.available(workload)
        placement = free.place(workload.shape, workload.workers)
        self._charge(workload, in_turn)
        self.reservations.take(workload, placement)
        self._granted += 1
        nodes = self.snapshot.nodes.nodes
        names = {nodes[i].name: pods for i, pods in sorted(placement.items())}
        self.snapshot.grants.append(Grant(uid=one.uid, nodes=one.nodes, placement=names))
        workload.queue.granted += not one.admitted
        self._settle(workload, placement)

    def _settle(self, workload: PendingWorkload, placement: Placement) -> None:
        """Count a workload that is admitted or nominated, and take the next head of its queue."""
        queue, one = workload.queue, workload.workload
        queue.quota.add(workload.usage)
        since = self.now.timestamp()
        self.snapshot.admitted.append(
            AdmittedWorkload(queue, one, workload.shape, placement, workload.usage, since)
        )
        self.settled.add(one.uid)
        reserved = self._waiting.get(queue)
        if reserved is None:
            queue.head = self._first(queue)
        else:
            reserved.take(workload)

    def _charge(self, workload: PendingWorkload, in_turn: bool) -> None:
        """Charge the round robin among the queues that could have used the same nodes."""
        rivals = [
            queue
            for queue in self.active
            if queue is workload.queue
            or (
                queue.head is not None
                and self.snapshot.overlap(queue.head.shape, workload.shape)
                and queue.quota.shortage(queue.head.usage) is None
            )
        ]
        charge(workload.queue.spare, workload.cost, [queue.spare for queue in rivals])
        if in_turn:
            charge(workload.queue.turn, workload.cost, [queue.turn for queue in rivals])
