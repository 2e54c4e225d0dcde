"""Who may run when: quotas, gangs, places near each other, and jobs that follow others."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.meta import Time, Wire
from torchrun_api.schema import Embedded, Quantity, Rule
from torchrun_api.shared import ObjectName

GangScheduling = Literal["kai", "volcano", "coscheduling", "native", "kueue", "none"]

Weight = Annotated[
    int,
    Meta(
        ge=0,
        le=1000,
        description="Share of what is free among the queues that have a weight, by GPUs (by nodes "
        "for CPU jobs). 0 pauses the queue: what runs goes on, nothing new is admitted.",
    ),
]
JobPriority = Annotated[int, Meta(ge=-1000000, le=1000000)]
TopologyKey = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=316,
        pattern="^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]


class Quota(Wire, frozen=True, kw_only=True):
    """What the running jobs of a queue may take together; what is unset is not limited."""

    nodes: Annotated[int, Meta(ge=0, le=100000, description="Nodes, that is pods.")] | None = None
    gpus: Annotated[int, Meta(ge=0, le=1000000, description="GPUs.")] | None = None
    cpu: Annotated[Quantity, Meta(description='CPUs, as 960 or "500m".')] | None = None
    memory: Annotated[Quantity, Meta(description='Memory, as "4Ti".')] | None = None
    jobs: Annotated[int, Meta(ge=0, le=100000, description="Jobs at the same time.")] | None = None


class Limits(Wire, frozen=True, kw_only=True):
    """An administrator's caps on each job of the queue."""

    max_nodes_per_job: (
        Annotated[int, Meta(ge=1, le=10000, description="A larger job is refused.")] | None
    ) = None
    max_run_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=100000000,
                description="A job has at most this as its activeDeadlineSeconds.",
            ),
        ]
        | None
    ) = None
    max_priority: (
        Annotated[
            JobPriority,
            Meta(description="A job whose spec.priority is higher is refused. Default: no limit."),
        ]
        | None
    ) = None


class Topology(Wire, frozen=True, kw_only=True):
    """The workers of a gang in one rack, zone or the like."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.required) || has(self.preferred)",
            "set required, preferred, or both to a label key of nodes,"
            " as topology.kubernetes.io/zone",
        ),
    )

    required: (
        Annotated[
            TopologyKey,
            Meta(description="Label key: all workers run on nodes with the same value of it."),
        ]
        | None
    ) = None
    preferred: (
        Annotated[TopologyKey, Meta(description="Label key: likewise where it can be done.")] | None
    ) = None
    name: (
        Annotated[
            ObjectName,
            Meta(description="KAI's Topology object that knows these keys. Default: its first."),
        ]
        | None
    ) = None


class QueueResource(Wire, frozen=True, kw_only=True):
    """An object that goes with the queue: made, kept and deleted with it."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=63,
            pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            description="Name of the object, see nameMode.",
        ),
    ]
    name_mode: Annotated[
        Literal["Prefixed", "Exact"],
        Meta(description="Prefixed: <queue>-<name>. Exact: <name>."),
    ] = "Prefixed"
    template: Annotated[
        Embedded,
        Meta(
            description="A v1 ConfigMap or PersistentVolumeClaim without name and namespace: "
            "it is made in the queue's."
        ),
    ]
    immutable: Annotated[
        bool, Meta(description="Made once and never changed, whatever becomes of the template.")
    ] = False


class Dependency(Wire, frozen=True, kw_only=True):
    """A job of the same namespace that must have come so far first."""

    name: Annotated[ObjectName, Meta(description="The other TorchrunJob.")]
    condition: Annotated[
        Literal["Succeeded", "Running", "Finished"],
        Meta(description="Finished: succeeded or failed for good."),
    ] = "Succeeded"


class MetDependency(Wire, frozen=True, kw_only=True):
    """A dependency that was met once; what becomes of the other job afterwards does not matter."""

    name: Annotated[str, Meta(description="The other TorchrunJob.")] = ""
    condition: Annotated[str, Meta(description="The condition that was met.")] = ""
    uid: Annotated[str, Meta(description="UID of the job that met it.")] = ""


class AdmittedHead(Wire, frozen=True, kw_only=True):
    """What the first node was admitted for, where it asks for less than the others."""

    requests: Annotated[
        dict[str, Quantity], Meta(description="Requests of its pod, GPUs included.")
    ] = field(default_factory=dict)
    gpus: Annotated[int, Meta(description="GPUs of its pod.")] = 0


class Admission(Wire, frozen=True, kw_only=True):
    """What a job was admitted for; its quota is charged with this until it is given back.

    A gang that asks for more of anything, or runs by another queue, is admitted again first.
    """

    nodes: Annotated[
        int, Meta(description="Nodes that the quota is charged with; none while it waits.")
    ] = 0
    queue: Annotated[str, Meta(description="TorchrunQueue whose quota is charged.")] = ""
    requests: Annotated[
        dict[str, Quantity],
        Meta(description="Requests of each node's pod as admitted, GPUs included."),
    ] = field(default_factory=dict)
    gpus: Annotated[int, Meta(description="GPUs of each node as admitted.")] = 0
    head: AdmittedHead | None = None
    time: Annotated[Time | None, Meta(description="Since when.")] = None
    limit: Annotated[
        int,
        Meta(
            description="Most nodes of the next gang, where it runs with fewer than it was "
            "admitted for: what is beyond is being given back to jobs that wait."
        ),
    ] = 0
    preempted_for: Annotated[
        str, Meta(description="UID of the job that it gives way to, until its pods are gone.")
    ] = ""
    nominated: Annotated[
        bool, Meta(description="Room is being made for it: others give way, nobody else gets it.")
    ] = False


class QueueJobs(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """Jobs of the queue that have not ended."""

    pending: Annotated[int, Meta(description="Wait: for anything.")] = 0
    admitted: Annotated[int, Meta(description="Admitted, and not all workers run.")] = 0
    running: Annotated[int, Meta(description="Run.")] = 0


class QueueAdmission(Wire, frozen=True, kw_only=True):
    """The coordinator's account of the queue."""

    summary: Annotated[str, Meta(description='Used of the quota, as "16/32 GPUs".')] = ""
    used: Annotated[
        dict[str, Quantity],
        Meta(description="Taken by admitted jobs: nodes, gpus, cpu, memory, jobs."),
    ] = field(default_factory=dict)
    free: Annotated[dict[str, Quantity], Meta(description="What the quota still has of them.")] = (
        field(default_factory=dict)
    )
    borrowed: Annotated[
        dict[str, Quantity], Meta(description="Taken beyond the quota, from the cohort's.")
    ] = field(default_factory=dict)
    weight: Annotated[int, Meta(description="The weight by which current was counted.")] = 0
    current: Annotated[
        int, Meta(description="Running weight of the round robin over the queues.")
    ] = 0
    spare: Annotated[
        int, Meta(description="Likewise, for the room that the next in turn leaves.")
    ] = 0


class QueueResourceStatus(Wire, frozen=True, kw_only=True):
    """How one of the queue's objects stands."""

    name: Annotated[str, Meta(description="As in spec.resources.")]
    object: Annotated[str, Meta(description="Kind and name of the object.")] = ""
    ready: Annotated[bool, Meta(description="Whether it is as the template says.")] = False
    message: Annotated[str, Meta(description="Why not, and what to do.")] = ""
