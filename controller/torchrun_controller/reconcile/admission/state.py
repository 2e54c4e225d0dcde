"""What the coordinator may look at and what it decides: two frozen values, which JSON can carry.

`admit(state, now)` in `coordinator.py` is a function of the State alone. All its memory is in the
objects that the State is made of: what is admitted, what is being preempted and for whom, who was
promised room, and the running weights of the round robin.
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct, field

Reason = Literal[
    "QueuePaused",
    "ExceedsQuota",
    "ExceedsNodes",
    "QuotaUsed",
    "WaitingForNodes",
    "WaitingForTurn",
    "LenderFirst",
    "BehindInQueue",
    "Preempting",
]


class Node(Struct, frozen=True, kw_only=True):
    """A machine. One that is not `usable` (not Ready, cordoned, tainted NoSchedule) takes no more.

    `allocatable` is what the pods of the requests may use, in whole numbers: "cpu" in millicores,
    "memory" in bytes, all else in pieces. It is the node's own figure less the requests of all
    other pods on it (DaemonSets, jobs of queues that take no part, and so on), as far as known.
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


class Limits(Struct, frozen=True, kw_only=True):
    """A quota in the units of Amounts; what is None is not limited."""

    nodes: int | None = None
    gpus: int | None = None
    cpu: int | None = None
    memory: int | None = None
    jobs: int | None = None


class Turn(Struct, frozen=True, kw_only=True):
    """A queue's running weights in the round robin, and the weight they were reached with.

    `current` decides whose head is next and holds the reservation; only heads that are admitted in
    their turn are charged to it, so that no backfill puts off a head. `spare` decides who may use
    what the reservation leaves; all that the queue gets is charged to it.
    """

    weight: int = 1
    current: int = 0
    spare: int = 0


class Queue(Struct, frozen=True, kw_only=True):
    """A queue that takes part, which is one with a quota, a weight or a cohort.

    `weight` None counts as 1; 0 admits nothing. `paused` says why nothing is admitted for another
    reason, and is empty otherwise. Queues of one namespace with the same `cohort` lend each other
    the quota that they do not use; for other namespaces see State.cohort_namespaces. `turn` is what
    Decisions.queues said of it last, None at first.
    """

    namespace: str
    name: str
    weight: int | None = None
    quota: Limits = Limits()
    cohort: str = ""
    paused: str = ""
    turn: Turn | None = None


class Request(Struct, frozen=True, kw_only=True):
    """A job that waits for admission (`admitted` is 0) or holds one. All others are left out.

    It holds what it was admitted for over restarts of its gang, until it ends, is suspended or
    deleted, or its last pod is gone after a preemption: from then on it waits again.

    `nodes` is how many pods it asks for and `admitted` for how many it was admitted. More than
    admitted is a wish to grow: it keeps what it holds, and gets the difference once every waiting
    job had its chance; it is never preempted for and never reserved for. Fewer is granted at once.

    `pod` is what each pod requests, in the units of Node.allocatable; `gpus` of these are GPUs.
    `node_selector` is the merged one of queue and job. `placed` counts its living pods by node.
    `since` is when it was admitted, None while it waits. `seconds_left` is how long it may still
    run by its deadline, None without one. `preempted_for` is the uid that Decisions.preempts said,
    as long as it holds. `nominated` repeats the Wait.nominated that was last said of it.

    `uses` is how many pods the present gang of an elastic job has, where it is smaller than what
    was admitted and the rest may be given back: None where all is in use.

    `gone`: the job does not exist any more, so nobody can tell its pods to make room.

    `head` is what the first pod requests, and `head_gpus` its GPUs, where it has less of some and
    more of nothing than the others: None where all are alike. A quota is charged with just that.
    No room is looked for it, which is the scheduler's matter, and it is not in `placed`: it may go
    where none of the others could.
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
    uses: int | None = None

    def slots(self, pods: int) -> int:
        """Of so many pods of a whole gang, those that room is looked for."""
        return pods - (self.head is not None)


class State(Struct, frozen=True, kw_only=True):
    """All nodes, queues that take part, and their requests, in any order.

    `nodes` is None where nothing is known of nodes: then quota alone decides. Of a request whose
    queue is not in `queues` nothing is decided; what it holds takes up room.

    A cohort is of one namespace: who writes queues in another must not reach its quota. Only the
    namespaces that an administrator names in `cohort_namespaces` share their cohorts.
    """

    nodes: tuple[Node, ...] | None = None
    queues: tuple[Queue, ...] = ()
    requests: tuple[Request, ...] = ()
    cohort_namespaces: tuple[str, ...] = ()


class Admit(Struct, frozen=True, kw_only=True):
    """The request may run `nodes` pods from now on: its first admission, or a change of its size.

    `placement` is where room was found for the new pods: advice, the scheduler has the last word.
    """

    uid: str
    nodes: int
    placement: dict[str, int] = field(default_factory=dict)


class Preempt(Struct, frozen=True, kw_only=True):
    """The request is to stop (with a checkpoint) and to wait anew; `for_uid` gets its room."""

    uid: str
    for_uid: str
    reason: Literal["HigherPriority", "Reclaimed"]
    message: str


class GiveBack(Struct, frozen=True, kw_only=True):
    """The request is to keep `nodes` pods, which is all that it uses; others wait for the rest."""

    uid: str
    nodes: int


class Wait(Struct, frozen=True):
    """Why a request does not get what it asks for. `position` counts from 1 in its queue.

    It is 0 for one that is not in line: it wishes to grow, was promised room (Preempting), or will
    never fit (ExceedsQuota, ExceedsNodes) and keeps nobody up. `nominated` has to be kept with the
    request, and to be written before any preemption for it: it is what freed room is kept for.
    """

    reason: Reason
    message: str
    position: int = 0
    nominated: bool = False


class QueueSummary(Struct, frozen=True, kw_only=True):
    """A queue after the decision. What is being preempted counts as used until its pods are gone.

    `free` is what its own quota still has, None for what is not limited; `borrowed` is what it
    uses beyond its quota. `pending` counts jobs that wait, `admitted` those that hold an admission
    and `running` those of them that run. `message` says why the queue admits nothing, if so.
    """

    namespace: str
    name: str
    turn: Turn
    used: Amounts = Amounts()
    free: Limits = Limits()
    borrowed: Amounts = Amounts()
    pending: int = 0
    admitted: int = 0
    running: int = 0
    message: str = ""


class Decisions(Struct, frozen=True, kw_only=True):
    """To be carried out in this order: `waits` and `queues`, `preempts`, `gives_back`, `admits`.

    `waits` has an entry for every request that does not hold what it asks for, by uid. The text
    of one far behind in its queue says only roughly where it stands, and so seldom changes.
    `requeue_after` is in seconds; 0 means that there is more to decide as soon as this is written.
    """

    admits: tuple[Admit, ...] = ()
    preempts: tuple[Preempt, ...] = ()
    gives_back: tuple[GiveBack, ...] = ()
    waits: dict[str, Wait] = field(default_factory=dict)
    queues: tuple[QueueSummary, ...] = ()
    requeue_after: float | None = None
