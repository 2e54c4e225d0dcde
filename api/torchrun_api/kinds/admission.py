"""Quotas, limits, topology, dependencies of jobs, and the status of admission."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.kinds.meta import Time, Wire
from torchrun_api.kinds.schema import Quantity, Rule
from torchrun_api.kinds.shared import ObjectName

Weight = Annotated[
    int,
    Meta(
        ge=0,
        le=1000,
        description="Share of the free capacity among queues that set a weight, counted in "
        "GPUs (in nodes for CPU jobs). 0 pauses the queue: running jobs "
        "continue, no job is admitted.",
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
    """Upper bounds of what the running jobs of a queue use together, unset for none."""

    nodes: Annotated[int, Meta(ge=0, le=100000, description="Nodes, with one pod each.")] | None = (
        None
    )
    gpus: Annotated[int, Meta(ge=0, le=1000000, description="GPUs.")] | None = None
    cpu: Annotated[Quantity, Meta(description='CPUs, for example 960 or "500m".')] | None = None
    memory: Annotated[Quantity, Meta(description='Memory, for example "4Ti".')] | None = None
    jobs: (
        Annotated[
            int, Meta(ge=0, le=100000, description="Jobs that are admitted at the same time.")
        ]
        | None
    ) = None
    min_run_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=86400,
            description="How long a gang of the queue runs before it may be preempted. A gang whose"
            " pods do not all run yet may be.",
        ),
    ] = 0


class JobLimits(Wire, frozen=True, kw_only=True):
    """An administrator's upper bounds for each job of the queue."""

    max_nodes_per_job: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=10000,
                description="Maximum number of nodes of a job. A larger job is rejected.",
            ),
        ]
        | None
    ) = None
    max_run_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=100000000,
                description="Upper bound of activeDeadlineSeconds, and its default for jobs that do"
                " not set it.",
            ),
        ]
        | None
    ) = None
    max_termination_grace_period_seconds: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=31536000,
                description="Maximum grace period of a job's pods. Pods that are stopped keep their"
                " machines and quota for that long. A job with a longer one is rejected. Default:"
                " 3600.",
            ),
        ]
        | None
    ) = None
    max_priority: (
        Annotated[
            JobPriority,
            Meta(
                description="Maximum spec.priority of a job. A job with a higher priority is "
                "rejected. Default: no limit."
            ),
        ]
        | None
    ) = None


class Topology(Wire, frozen=True, kw_only=True):
    """Places the pods of a gang close together, for example in one rack or zone."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.required) || has(self.preferred)",
            "set required, preferred, or both to the key of a label of Nodes, for example"
            " topology.kubernetes.io/zone",
        ),
    )

    required: (
        Annotated[
            TopologyKey,
            Meta(
                description="Label of Nodes. All pods of a gang run on machines with the same "
                "value of this label."
            ),
        ]
        | None
    ) = None
    preferred: (
        Annotated[
            TopologyKey,
            Meta(
                description="Label of Nodes. The scheduler prefers machines with the same value of "
                "this label."
            ),
        ]
        | None
    ) = None
    name: (
        Annotated[
            ObjectName,
            Meta(
                description="Name of the KAI Topology object that lists these labels. Default: the "
                "first one."
            ),
        ]
        | None
    ) = None


class Dependency(Wire, frozen=True, kw_only=True):
    """A job in the same namespace that must reach a state before this one starts."""

    name: Annotated[ObjectName, Meta(description="Name of the other TorchrunJob.")]
    condition: Annotated[
        Literal["Succeeded", "Running", "Finished"],
        Meta(
            description="State that the other job must reach. Running: all of its pods have "
            "run. Finished: it is Succeeded, Failed or TimedOut."
        ),
    ] = "Succeeded"


class MetDependency(Wire, frozen=True, kw_only=True):
    """A dependency that is met. Later changes of the other job do not matter."""

    name: Annotated[str, Meta(description="Name of the other TorchrunJob.")] = ""
    condition: Annotated[str, Meta(description="Condition that is met.")] = ""
    uid: Annotated[str, Meta(description="UID of the job that met the condition.")] = ""


class AdmittedHead(Wire, frozen=True, kw_only=True):
    """Admitted resources of the first node, if they are fewer than those of the others."""

    requests: Annotated[
        dict[str, Quantity], Meta(description="Resource requests of its pod, including GPUs.")
    ] = field(default_factory=dict)
    gpus: Annotated[int, Meta(description="GPUs of its pod.")] = 0


class Admission(Wire, frozen=True, kw_only=True):
    """What the job is admitted for. The quota is charged with it until the job releases it.

    A gang that needs more of any resource, or runs in another queue, is admitted again first.
    """

    nodes: Annotated[
        int, Meta(description="Number of nodes charged to the quota. Unset while the job waits.")
    ] = 0
    queue: Annotated[str, Meta(description="TorchrunQueue whose quota is charged.")] = ""
    requests: Annotated[
        dict[str, Quantity],
        Meta(description="Admitted resource requests of each pod, including GPUs."),
    ] = field(default_factory=dict)
    gpus: Annotated[int, Meta(description="Admitted GPUs of each node.")] = 0
    head: AdmittedHead | None = None
    time: Annotated[Time | None, Meta(description="Time of admission.")] = None
    preempted_for: Annotated[
        str,
        Meta(
            description="UID of the job that preempts this one. Set until the pods of this job "
            "are gone."
        ),
    ] = ""
    nominated: Annotated[
        bool,
        Meta(
            description="Other jobs are being preempted for this one, and their quota is "
            "reserved for it."
        ),
    ] = False


class QueueJobs(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """Counts of the unfinished jobs of the queue."""

    pending: Annotated[int, Meta(description="Jobs that wait for any reason.")] = 0
    admitted: Annotated[
        int, Meta(description="Jobs that are admitted, but whose pods do not all run.")
    ] = 0
    running: Annotated[int, Meta(description="Jobs that run.")] = 0


class QueueAdmission(Wire, frozen=True, kw_only=True):
    """Usage of the quota and order of admission of the queue."""

    summary: Annotated[
        str,
        Meta(
            description="Used quota of GPUs, nodes or jobs, whichever the quota limits first: for "
            'example "16/32 GPUs".'
        ),
    ] = ""
    used: Annotated[
        dict[str, Quantity],
        Meta(description="Usage of admitted jobs: nodes, gpus, cpu, memory and jobs."),
    ] = field(default_factory=dict)
    free: Annotated[dict[str, Quantity], Meta(description="Unused quota.")] = field(
        default_factory=dict
    )
    borrowed: Annotated[
        dict[str, Quantity], Meta(description="Usage above the quota, borrowed from the cohort.")
    ] = field(default_factory=dict)
    weight: Annotated[int, Meta(description="Weight with which current was computed.")] = 0
    current: Annotated[
        int, Meta(description="Current weight of the queue in the smooth weighted round robin.")
    ] = 0
