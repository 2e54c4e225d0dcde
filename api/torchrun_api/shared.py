"""Parts of a spec that stand in queues and in jobs alike; a job's value overrides its queue's."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.meta import Wire
from torchrun_api.schema import Embedded, Quantity, Rule

AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
RdzvBackend = Literal["static", "c10d", "etcd-v2", "etcd"]

DeliveryMode = Literal["auto", "shared", "direct"]

MountPath = Annotated[str, Meta(min_length=1, max_length=512, pattern="^/[^:]*$")]
ObjectName = Annotated[
    str, Meta(min_length=1, max_length=253, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
# Of an object whose name other controllers read from a label.
LabelledName = Annotated[
    str, Meta(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
SchedulerName = Annotated[str, Meta(min_length=1, max_length=253)]
LabelValue = Annotated[
    str, Meta(max_length=63, pattern="^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
]
ImageName = Annotated[str, Meta(min_length=1, max_length=1024)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=512)]
Port = Annotated[int, Meta(ge=1, le=65535)]
NodeCount = Annotated[int, Meta(ge=1, le=10000)]
GpuCount = Annotated[int, Meta(ge=1, le=100000)]
ProcessCount = Annotated[int, Meta(ge=1, le=1024)]
RestartCount = Annotated[int, Meta(ge=0, le=1000)]
LabelMap = Annotated[dict[str, LabelValue], Meta(max_length=64)]
StringMap = Annotated[dict[str, Annotated[str, Meta(max_length=65536)]], Meta(max_length=64)]

Delivery = Annotated[
    DeliveryMode,
    Meta(
        description="How workers get the workspace. shared: from its claim. direct: over HTTP from "
        "a pod of the job, which needs no shared storage. auto: shared, and direct where the claim "
        "is not bound within 30 s or its provisioning fails."
    ),
]
NodeSelector = Annotated[LabelMap, Meta(description="Labels that a worker's node must have.")]
Tolerations = Annotated[
    tuple[Embedded, ...], Meta(max_length=64, description="v1 Tolerations of the workers.")
]
Affinity = Annotated[Embedded, Meta(description="v1 Affinity of the workers.")]
PriorityClassName = Annotated[ObjectName, Meta(description="PriorityClass of the workers.")]
StorageClassName = Annotated[
    ObjectName, Meta(description="Class of the claim. Default: the cluster's default class.")
]
ClaimAccessMode = Annotated[
    AccessMode,
    Meta(description="Default: ReadWriteMany for several nodes, ReadWriteOnce for one."),
]
ClaimSize = Annotated[
    Quantity,
    Meta(description='Size of the claim, as "100Gi". Default: by sizePerGPU, without it 10Gi.'),
]
SizePerGpu = Annotated[
    Quantity, Meta(description="Size of the claim for each GPU of the job (at least one).")
]
SharedClaim = Annotated[
    ObjectName, Meta(description="A claim that exists already, to be shared between jobs.")
]


HostPath = Annotated[
    MountPath,
    Meta(
        description="Checkpoints stay on the nodes: in <hostPath>/<namespace>/<job> of each, in "
        "place of a claim. size is what a worker may need there. A new gang prefers the nodes of "
        "the last one, then those with most free local storage. Needs a namespace whose pod "
        "security allows hostPath volumes."
    ),
]


class LocalObjectReference(Wire, frozen=True, kw_only=True):
    """An object of the same namespace."""

    name: Annotated[ObjectName, Meta(description="Name of the object.")]


ONE_SIZE = Rule(
    "!has(self.size) || !has(self.sizePerGPU)",
    "size contradicts sizePerGPU: leave one of them out",
)
EXISTING_CLAIM = Rule(
    "!has(self.claimName) || !(has(self.size) || has(self.sizePerGPU)"
    " || has(self.storageClassName))",
    "claimName takes a claim that exists, so it contradicts size, sizePerGPU and storageClassName",
)


LOCAL_CHECKPOINTS = Rule(
    "!has(self.hostPath) || !(has(self.claimName) || has(self.storageClassName)"
    " || has(self.accessMode))",
    "hostPath keeps checkpoints on the nodes, so it contradicts claimName, storageClassName and"
    " accessMode",
)


class Distributed(Wire, frozen=True, kw_only=True):
    """How the ranks find each other. A job's value overrides its queue's, field by field."""

    backend: Annotated[
        Literal["nccl", "gloo", "mpi", "ucc"] | None,
        Meta(
            description="torch.distributed backend, handed to ranks as TORCHRUN_BACKEND. "
            "Default: nccl on GPUs, gloo on CPU."
        ),
    ] = None
    rdzv_backend: Annotated[
        RdzvBackend | None,
        Meta(
            description="torchrun's rendezvous. Default: static for a fixed size, c10d for elastic "
            "jobs. etcd-v2 and etcd need rdzvEndpoint; without one the default is used and said so."
        ),
    ] = None
    rdzv_endpoint: Annotated[
        Endpoint | None, Meta(description="host:port of the rendezvous. Default: the first worker.")
    ] = None
    port: Annotated[
        Port | None, Meta(description="Rendezvous and master port. Default: 29500.")
    ] = None
    nproc_per_node: Annotated[
        ProcessCount | None,
        Meta(description="Processes on each node. Default: its GPUs; 1 on CPU."),
    ] = None
    max_restarts: Annotated[
        RestartCount | None, Meta(description="torchrun's own restarts inside a pod. Default: 0.")
    ] = None


class Dataset(Wire, frozen=True, kw_only=True):
    """A claim that exists already, mounted into every worker."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=50,
            pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            description="Name of the dataset; a job's dataset replaces its queue's of that name.",
        ),
    ]
    claim_name: Annotated[ObjectName, Meta(description="The claim, in the job's namespace.")]
    mount_path: Annotated[MountPath, Meta(description="Where workers find it.")]
    read_only: Annotated[bool, Meta(description="Mount it read-only.")] = True


class CheckpointsOverride(Wire, frozen=True, kw_only=True):
    """The job's checkpoint storage; what is unset is the queue's."""

    RULES: ClassVar[tuple[Rule, ...]] = (ONE_SIZE, EXISTING_CLAIM, LOCAL_CHECKPOINTS)

    enabled: Annotated[bool, Meta(description="Whether there is a claim.")] | None = None
    size: ClaimSize | None = None
    size_per_gpu: SizePerGpu | None = field(default=None, name="sizePerGPU")
    storage_class_name: StorageClassName | None = None
    access_mode: ClaimAccessMode | None = None
    claim_name: SharedClaim | None = None
    host_path: HostPath | None = None
    mount_path: Annotated[MountPath, Meta(description="Where workers find it.")] | None = None
    retain: Annotated[bool, Meta(description="Keep the claim when the job is deleted.")] | None = (
        None
    )


class PodTemplate(Wire, frozen=True, kw_only=True):
    """Merged under the workers' pods by Kubernetes' strategic merge rules (containers by name).

    The container `trainer` is the training container.
    """

    metadata: Annotated[Embedded, Meta(description="Labels and annotations of the pods.")] = field(
        default_factory=dict
    )
    spec: Annotated[Embedded, Meta(description="v1 PodSpec, or the part of it that you set.")] = (
        field(default_factory=dict)
    )
