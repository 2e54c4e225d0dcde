"""The state of one decision: queues with their workloads, quotas, and free machines."""

from collections import defaultdict
from math import inf

from torchrun_controller.reconcile.admission.cohorts import CohortKey, Cohorts
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Grant,
    Queue,
    QueueSummary,
    RoundRobinState,
    Workload,
)
from torchrun_controller.reconcile.admission.node_capacity import NodeIndex, Placement, PodShape
from torchrun_controller.reconcile.admission.quota import (
    Cohort,
    QueueQuota,
    Usage,
    cost_of,
    usage_of,
)
from torchrun_controller.reconcile.admission.weighted_round_robin import (
    Peer,
    forgive_debts,
    initial_states,
)


class PendingWorkload:
    """What a workload still requests: all of its pods, or those that it asks to grow by."""

    __slots__ = ("cost", "pods", "queue", "seconds", "shape", "usage", "workers", "workload")

    def __init__(self, queue: "QueueSnapshot", workload: Workload, shape: PodShape) -> None:
        self.queue = queue
        self.workload = workload
        self.shape = shape
        self.pods = workload.nodes - workload.admitted
        self.workers = self.pods if workload.admitted else workload.workers(self.pods)
        self.usage = usage_of(workload, self.pods, 0 if workload.admitted else 1)
        self.cost = cost_of(self.usage)
        self.seconds = _seconds_left(workload)


class AdmittedWorkload:
    """What an admitted workload occupies, and in how many seconds it ends at the latest.

    `assumed` is the part of `placement` for pods without a machine.
    """

    __slots__ = (
        *("assumed", "placement", "preempted_for", "queue", "seconds", "shape", "since", "usage"),
        "workload",
    )

    def __init__(
        self,
        queue: "QueueSnapshot | None",
        workload: Workload,
        shape: PodShape,
        placement: Placement,
        usage: Usage,
        since: float,
    ) -> None:
        self.queue = queue
        self.workload = workload
        self.shape = shape
        self.placement = placement
        self.assumed: Placement = {}
        self.usage = usage
        self.since = since
        self.seconds = _seconds_left(workload)
        self.preempted_for = ""
        if workload.preempted_for:
            self.preempt(workload.preempted_for)

    def preempt(self, for_uid: str) -> None:
        """Preempt the workload: its machines are free as soon as its pods have stopped."""
        self.preempted_for = for_uid
        self.seconds = 0.0

    @property
    def gives_way(self) -> bool:
        """Whether a decision may preempt the workload."""
        workload = self.workload
        return not (workload.is_deleted or workload.is_fixed or workload.protected_seconds > 0)

    @property
    def end_order(self) -> tuple[float, float, str]:
        """The order in which workloads are expected to end: by deadline, then by age."""
        return self.seconds, self.since, self.workload.uid


class QueueSnapshot:
    """A queue: its pending workloads in order, those with an admission, and its running weights."""

    def __init__(self, queue: Queue, quota: QueueQuota, state: RoundRobinState) -> None:
        self.queue = queue
        self.name = queue.name
        self.quota = quota
        self.weight = state.weight
        self.turn = Peer(state.weight, state.current)
        self.pending: list[Workload] = []
        self.admitted: list[AdmittedWorkload] = []
        self.granted = 0  # first admissions by this decision
        self.next = 0  # index of the first pending workload that has not been looked at
        self.head: PendingWorkload | None = None

    @property
    def paused_reason(self) -> str:
        """Why the queue admits nothing, else ""."""
        if self.queue.paused_reason:
            return self.queue.paused_reason
        if self.weight <= 0:
            return f"Queue {self.name} is paused because its weight is 0. Set it to 1 or more."
        return ""

    def summary(self) -> QueueSummary:
        """Return the summary of the queue for its status, after the decision."""
        used, free, borrowed = self.quota.report()
        return QueueSummary(
            namespace=self.queue.namespace,
            name=self.name,
            round_robin=RoundRobinState(weight=self.weight, current=self.turn.current),
            used=used,
            free=free,
            borrowed=borrowed,
            pending=len(self.pending) - self.granted,
            admitted=len(self.admitted) + self.granted,
            running=sum(admitted.workload.running for admitted in self.admitted),
            message=self.paused_reason,
        )


class Snapshot:
    """The complete state. A decision changes it in place."""

    def __init__(self, state: ClusterState) -> None:
        self.nodes = NodeIndex(state.nodes)
        self.empty = self.nodes.empty()
        self.free = self.nodes.empty()
        self.queues = _queues(state)
        self.admitted: list[AdmittedWorkload] = []
        self.grants: list[Grant] = []
        by_key = {(queue.queue.namespace, queue.name): queue for queue in self.queues}
        for workload in state.workloads:
            queue = by_key.get((workload.namespace, workload.queue))
            if workload.admitted:
                self._add_admitted(queue, workload)
            elif queue is not None:
                queue.pending.append(workload)
        self._place_pending_pods()
        self.preempted = [admitted for admitted in self.admitted if admitted.preempted_for]
        self.grants.sort(key=lambda grant: grant.uid)
        for queue in self.queues:
            queue.pending.sort(key=queue_order)
            if not queue.pending:
                queue.turn.current = 0
        waiting = [queue for queue in self.queues if queue.pending and not queue.paused_reason]
        forgive_debts([queue.turn for queue in waiting])

    def pending(self, queue: QueueSnapshot, workload: Workload) -> PendingWorkload:
        """Return what the workload requests, with its shape."""
        return PendingWorkload(queue, workload, self.nodes.shape(workload))

    def overlap(self, first: PodShape, second: PodShape) -> bool:
        """Whether both could use the same machines."""
        return self.nodes.overlap(first.pool, second.pool)

    def unscheduled_jobs(self, shape: PodShape) -> list[str]:
        """Return the jobs that need no admission and whose pods without a machine come first."""
        return [
            f"{admitted.workload.namespace}/{admitted.workload.name}"
            for admitted in self.admitted
            if admitted.queue is None and not shape.pool.members.isdisjoint(admitted.assumed)
        ]

    def _add_admitted(self, queue: QueueSnapshot | None, workload: Workload) -> None:
        index = self.nodes.index
        placement = {
            index[name]: pods for name, pods in workload.pods_by_node.items() if name in index
        }
        since = workload.since.timestamp() if workload.since else 0.0
        usage = usage_of(workload, workload.admitted)
        shape = self.nodes.shape(workload)
        admitted = AdmittedWorkload(queue, workload, shape, placement, usage, since)
        self.admitted.append(admitted)
        self.free.take(shape, placement)
        if queue is not None:
            queue.admitted.append(admitted)
            queue.quota.add(usage)
        if workload.nodes < workload.admitted:
            self.grants.append(Grant(uid=workload.uid, nodes=workload.nodes))

    def _place_pending_pods(self) -> None:
        """Assume a machine for each admitted pod that has none, oldest admission first.

        A gang of a queue that takes no part may be too large for the cluster: it never starts, so
        its pods without a machine get none.

        Of a deleted job, only pods that have a machine count: any user of its namespace can create
        such pods.
        """
        self.admitted.sort(key=lambda admitted: (admitted.since, admitted.workload.uid))
        for admitted in self.admitted:
            workload = admitted.workload
            workers = workload.workers(workload.admitted)
            missing_pods = workers - sum(workload.pods_by_node.values())
            is_too_large = admitted.queue is None and self.empty.capacity(admitted.shape) < workers
            if missing_pods > 0 and not (workload.is_deleted or is_too_large):
                admitted.assumed = self.free.place_admitted(admitted.shape, missing_pods)
                self.free.take(admitted.shape, admitted.assumed)
                for i, pods in admitted.assumed.items():
                    admitted.placement[i] = admitted.placement.get(i, 0) + pods


def queue_order(workload: Workload) -> tuple[int, float, str, str]:
    """Return the sort key within a queue: priority, then age."""
    return -workload.priority, workload.created.timestamp(), workload.name, workload.uid


def _seconds_left(workload: Workload) -> float:
    return inf if workload.seconds_left is None else workload.seconds_left


def _queues(state: ClusterState) -> list[QueueSnapshot]:
    sorted_queues = sorted(state.queues, key=lambda queue: (queue.namespace, queue.name))
    keys, cohorts = Cohorts(state), defaultdict[CohortKey, Cohort](Cohort)
    queues = []
    for queue, turn in zip(sorted_queues, initial_states(sorted_queues), strict=True):
        cohort = cohorts[keys.key(queue)]
        queues.append(QueueSnapshot(queue, QueueQuota(queue.quota, cohort), turn))
    return queues
