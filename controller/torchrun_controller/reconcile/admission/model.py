"""What the coordinator may look at and what it decides: two frozen values, which JSON can carry.

`admit(state, now)` in `coordinator.py` is a function of the ClusterState alone. All of its memory
is in the objects that the state is made of: what is admitted, what is being preempted and for whom,
who is nominated for freed room, and the running weights of the round robin.
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct, field

PendingReason = Literal[
    "QueuePaused",
    "ExceedsQuota",
    "ExceedsNodes",
    "InsufficientQuota",
    "WaitingForNodes",
    "WaitingForTurn",
    "WaitingForLender",
    "BehindInQueue",
    "Preempting",
]


class NodeCapacity(Struct, frozen=True, kw_only=True):
    """A node. One that is not `usable` (not Ready, cordoned, tainted NoSchedule) takes no more.

    `allocatable` is what the pods of workloads may use, in whole numbers: "cpu" in millicores,
    "memory" in bytes, all else in pieces. It is the node's own figure less the configured overhead
    of other pods.
    """

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    allocatable: dict[str, int] = field(default_factory=dict)
    usable: bool = True


class Amounts(Struct, frozen=True, kw_only=True):
    """The five things that a quota counts: pods (one a node), GPUs, millicores, bytes and jobs."""

    nodes: int = 0
    gpus: int = 0
    cpu: int = 0
    memory: int = 0
    jobs: int = 0


class QuotaLimits(Struct, frozen=True, kw_only=True):
    """A quota in the units of Amounts; None is unlimited."""

    nodes: int | None = None
    gpus: int | None = None
    cpu: int | None = None
    memory: int | None = None
    jobs: int | None = None


class RoundRobinState(Struct, frozen=True, kw_only=True):
    """A queue's running weights in the round robin, and the weight they were reached with.

    `current` decides whose head is next and gets the reservation; only heads that are admitted in
    their turn are charged to it, so backfill delays no head. `spare` decides who may use what the
    reservation leaves; everything that the queue gets is charged to it.
    """

    weight: int = 1
    current: int = 0
    spare: int = 0


class Queue(Struct, frozen=True, kw_only=True):
    """A queue that takes part in admission: it has a quota, a weight or a cohort.

    `weight` None counts as 1; 0 admits nothing. `paused_reason` says why nothing is admitted for
    another reason, and is empty otherwise. Queues of one namespace with the same `cohort` lend each
    other unused quota; for other namespaces see ClusterState.cohort_namespaces. `round_robin` is
    the last value in QueueSummary, None at first.
    """

    namespace: str
    name: str
    weight: int | None = None
    quota: QuotaLimits = QuotaLimits()
    cohort: str = ""
    paused_reason: str = ""
    round_robin: RoundRobinState | None = None


class Workload(Struct, frozen=True, kw_only=True):
    """A job that waits for admission (`admitted` is 0) or has it. Other jobs are left out.

    It keeps its admission over restarts of its gang, until it ends, is suspended or deleted, or its
    last pod is gone after a preemption: from then on it waits again.

    `nodes` is how many pods it asks for and `admitted` for how many it was admitted. More than
    admitted is a wish to grow: it keeps what it has, and gets the difference after every waiting
    job had its chance. Nothing is preempted or reserved for growth. Fewer is granted at once.

    `pod` is what each pod requests, in the units of NodeCapacity.allocatable; `gpus` of these are
    GPUs. `node_selector` is the merged one of queue and job. `placed` counts its living pods by
    node. `since` is when it was admitted, None while it waits. `seconds_left` is how long it may
    still run by its deadline, None without one. `preempted_for` is the uid in its Preemption while
    that lasts. `nominated` repeats the last PendingStatus.nominated.

    `shrunk_to` is how many pods the present gang of an elastic job has, where it is smaller than
    what was admitted and the rest may be released: None where all is in use.

    `gone`: the job is deleted, so nobody can tell its pods to stop.

    `head` is what the first pod requests, and `head_gpus` its GPUs, where that is less of some
    resources and more of none: None where all pods are alike. Quota is charged with exactly that.
    No room is looked for the head, and it is not in `placed`: the scheduler finds its node, which
    may be one without room for a worker.
    """

    namespace: str
    name: str
    uid: str
    queue: str
    created: datetime
    nodes: int
    pod: dict[str, int] = field(default_factory=dict)
    gpus: int = 0
    head: dict[str, int] | None = None
    head_gpus: int = 0
    priority: int = 0
    node_selector: dict[str, str] = field(default_factory=dict)
    admitted: int = 0
    placed: dict[str, int] = field(default_factory=dict)
    since: datetime | None = None
    seconds_left: float | None = None
    running: bool = False
    preempted_for: str = ""
    nominated: bool = False
    gone: bool = False
    shrunk_to: int | None = None

    def workers(self, pods: int) -> int:
        """Pods that room is looked for, of a whole gang of this many."""
        return pods - (self.head is not None)


class ClusterState(Struct, frozen=True, kw_only=True):
    """All nodes, the queues that take part, and their workloads, in any order.

    `nodes` is None where nodes are not known: then quota alone decides. Nothing is decided about a
    workload whose queue is not in `queues`; what it was admitted for takes up room.

    A cohort is of one namespace: who writes queues in another must not reach its quota. Only the
    namespaces that an administrator names in `cohort_namespaces` share their cohorts.
    """

    nodes: tuple[NodeCapacity, ...] | None = None
    queues: tuple[Queue, ...] = ()
    workloads: tuple[Workload, ...] = ()
    cohort_namespaces: tuple[str, ...] = ()


class Grant(Struct, frozen=True, kw_only=True):
    """The workload may run `nodes` pods: its first admission, or a change of its size.

    `placement` is where room was found for the new pods; the scheduler has the last word.
    """

    uid: str
    nodes: int
    placement: dict[str, int] = field(default_factory=dict)


class Preemption(Struct, frozen=True, kw_only=True):
    """The workload has to stop (with a checkpoint) and to wait again; `for_uid` gets its room."""

    uid: str
    for_uid: str
    reason: Literal["HigherPriority", "Reclaimed"]
    message: str


class Release(Struct, frozen=True, kw_only=True):
    """The workload keeps `nodes` pods, which is all that it uses; others wait for the rest."""

    uid: str
    nodes: int


class PendingStatus(Struct, frozen=True):
    """Why a workload does not get what it asks for. `position` counts from 1 in its queue.

    It is 0 for one that is not in line: it wishes to grow, is nominated for freed room
    (Preempting), or can never fit (ExceedsQuota, ExceedsNodes) and delays nobody. `nominated` has
    to be kept with the workload, and to be written before any preemption for it.
    """

    reason: PendingReason
    message: str
    position: int = 0
    nominated: bool = False


class QueueSummary(Struct, frozen=True, kw_only=True):
    """A queue after the decision. What is being preempted counts as used until its pods are gone.

    `free` is what its own quota still has, None for what is not limited; `borrowed` is what it
    uses beyond its quota. `pending` counts jobs that wait, `admitted` those with an admission and
    `running` those of them that run. `message` says why the queue admits nothing, if so.
    """

    namespace: str
    name: str
    round_robin: RoundRobinState
    used: Amounts = Amounts()
    free: QuotaLimits = QuotaLimits()
    borrowed: Amounts = Amounts()
    pending: int = 0
    admitted: int = 0
    running: int = 0
    message: str = ""


class Decisions(Struct, frozen=True, kw_only=True):
    """To be carried out in this order: `pending`, `queues`, `preemptions`, `releases`, `grants`.

    `pending` has an entry, by uid, for every workload that does not have what it asks for.
    `requeue_after` is in seconds; 0 means that there is more to decide as soon as this is written.
    """

    grants: tuple[Grant, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    releases: tuple[Release, ...] = ()
    pending: dict[str, PendingStatus] = field(default_factory=dict)
    queues: tuple[QueueSummary, ...] = ()
    requeue_after: float | None = None
