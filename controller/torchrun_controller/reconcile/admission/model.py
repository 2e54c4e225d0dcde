"""Input and output of the coordinator: two frozen values that can be encoded as JSON.

`admit(state, now)` in `coordinator.py` is a function of the ClusterState alone. All of its memory
is in the objects that the state is built from: which workloads are admitted, preempted (and for
whom) or nominated, and the running weights of the round robin.
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
    "BehindInQueue",
    "Preempting",
]


class NodeCapacity(Struct, frozen=True, kw_only=True):
    """A machine. No new pod is placed on one that is not `usable` (not Ready, cordoned, tainted).

    `allocatable` is what the pods of workloads may use, in integers: "cpu" in millicores,
    "memory" in bytes, everything else in units. It is the allocatable of the machine less the
    configured overhead of other pods.
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
    """The running weights of a queue in the round robin, and the weight that they belong to.

    `current` decides whose head is next and gets the reservation, and which queue may use what the
    reservation leaves. Every admission of the queue is charged to it.
    """

    weight: int
    current: int = 0


class Queue(Struct, frozen=True, kw_only=True):
    """A queue that takes part in admission: it has a quota, a weight or a cohort.

    `weight` None counts as 1; 0 admits nothing. `paused_reason` is any other reason why nothing is
    admitted, else "". Queues of one namespace with the same `cohort` lend each other unused quota;
    for other namespaces see ClusterState.cohort_namespaces. `round_robin` is the last value in
    QueueSummary, None at first.
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

    A job keeps its admission over restarts of its gang. It loses it when it finishes, is suspended
    or deleted, or when its last pod is gone after a preemption: then it waits again.

    `nodes` is how many pods it requests, `admitted` how many were admitted. If `nodes` is larger,
    the job asks to grow: it gets the difference after the waiting jobs, and nothing is preempted or
    reserved for it. If `nodes` is smaller, it is granted at once.

    `pod` is what each pod requests, in the units of NodeCapacity.allocatable; `gpus` of these are
    GPUs. `node_selector` is merged from queue and job. `pods_by_node` counts its running pods.
    `since` is when it was admitted, None while it waits. `seconds_left` is the running time until
    its deadline, at least 0, None without one. `preempted_for` is the UID in its Preemption while
    that lasts. `nominated` repeats the last PendingStatus.nominated.

    Of a gang that runs: `ran_seconds` is how long it has run, `unsaved_seconds` how long since its
    last checkpoint, None for a job that reports none, and `saved_step` the step of that checkpoint.
    All three are claims of the job or depend on one, so they only choose among jobs of one
    priority. `preemptions` are those within a day, and `protected_seconds` is for how long the gang
    may not be preempted, by `minRunSeconds` of its queue.

    `is_deleted`: the job is deleted, so its pods cannot be preempted. `is_fixed`: its status cannot
    be written at present, so it is not preempted.

    `head` is what the first pod requests, and `head_gpus` its GPUs, if that is less of some
    resources and more of none; None if all pods are alike. Quota is charged with exactly that. The
    coordinator places no head, and the head is not in `pods_by_node`: the scheduler finds its
    machine, which may have no room for a worker.
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
    pods_by_node: dict[str, int] = field(default_factory=dict)
    since: datetime | None = None
    seconds_left: float | None = None
    running: bool = False
    ran_seconds: float = 0.0
    unsaved_seconds: float | None = None
    saved_step: int | None = None
    preemptions: int = 0
    protected_seconds: float = 0.0
    preempted_for: str = ""
    nominated: bool = False
    is_deleted: bool = False
    is_fixed: bool = False

    def workers(self, pods: int) -> int:
        """Return how many of this many pods the coordinator places: all but the head."""
        return pods - (self.head is not None)


class ClusterState(Struct, frozen=True, kw_only=True):
    """All machines, the queues that take part, and their workloads, in any order.

    `nodes` is None if machines are unknown: then quota alone decides. Nothing is decided about a
    workload whose queue is not in `queues`; it still occupies what it was admitted for.

    A cohort belongs to one namespace: a user who creates queues in another namespace must not reach
    its quota. Only the namespaces that an administrator lists in `cohort_namespaces` share cohorts.
    """

    nodes: tuple[NodeCapacity, ...] | None = None
    queues: tuple[Queue, ...] = ()
    workloads: tuple[Workload, ...] = ()
    cohort_namespaces: tuple[str, ...] = ()


class Grant(Struct, frozen=True, kw_only=True):
    """The workload may run `nodes` pods: its first admission, or a change of its size.

    `placement` is where the coordinator assumed the new pods; the scheduler decides.
    """

    uid: str
    nodes: int
    placement: dict[str, int] = field(default_factory=dict)


class Preemption(Struct, frozen=True, kw_only=True):
    """The workload has to stop (with a checkpoint) and wait again; `for_uid` gets its machines."""

    uid: str
    for_uid: str
    reason: Literal["HigherPriority", "Reclaimed"]
    message: str


class PendingStatus(Struct, frozen=True):
    """Why a workload does not get what it requests. `position` counts from 1 in its queue.

    The position is 0 for a workload that is not in line: it asks to grow, is nominated for the
    machines of preempted workloads (Preempting), or can never fit (ExceedsQuota, ExceedsNodes) and
    delays no other. `nominated` has to be stored with the workload, before any preemption for it.
    """

    reason: PendingReason
    message: str
    position: int = 0
    nominated: bool = False


class QueueSummary(Struct, frozen=True, kw_only=True):
    """A queue after the decision. A preempted workload counts as used until its pods are gone, and
    the one that is nominated for its machines from then on.

    `free` is what is left of its own quota, None for an unlimited resource; `borrowed` is its use
    beyond its quota. `pending` counts jobs that wait, `admitted` those with an admission and
    `running` those of them that run. `message` is why the queue admits nothing, else "".
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
    """What to write, in this order: `pending`, `queues`, `preemptions`, `grants`.

    `pending` has an entry, by UID, for every workload that does not have what it requests.
    `requeue_after` is in seconds; 0 if there is more to decide as soon as this is written.
    """

    grants: tuple[Grant, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    pending: dict[str, PendingStatus] = field(default_factory=dict)
    queues: tuple[QueueSummary, ...] = ()
    requeue_after: float | None = None
