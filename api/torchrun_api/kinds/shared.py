"""Parts of a spec that occur in queues and in jobs. A job's value overrides its queue's."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.kinds.meta import Wire
from torchrun_api.kinds.schema import Embedded, Quantity, Rule

AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
RdzvBackend = Literal["static", "c10d", "etcd-v2", "etcd"]

DeliveryMode = Literal["auto", "shared", "direct"]

MountPath = Annotated[str, Meta(min_length=1, max_length=512, pattern="^/[^:]*$")]
ObjectName = Annotated[
    str, Meta(min_length=1, max_length=253, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
# Name of an object whose name other controllers read from a label.
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
        description="How pods get the workspace. shared: from its PVC. direct: over HTTP "
        "from a pod of the job, without shared storage. auto: shared, or direct"
        " if the PVC is not bound within 30 s or its provisioning fails."
    ),
]
NodeSelector = Annotated[LabelMap, Meta(description="Labels that a machine must have.")]
Tolerations = Annotated[
    tuple[Embedded, ...], Meta(max_length=64, description="v1 Tolerations of the pods.")
]
Affinity = Annotated[Embedded, Meta(description="v1 Affinity of the pods.")]
PriorityClassName = Annotated[ObjectName, Meta(description="PriorityClass of the pods.")]
StorageClassName = Annotated[
    ObjectName, Meta(description="StorageClass of the PVC. Default: the cluster's default class.")
]
ClaimAccessMode = Annotated[
    AccessMode,
    Meta(
        description="Access mode of the PVC. Default: ReadWriteMany for several nodes (numNodes, "
        "or maxNodes of an elastic job), ReadWriteOnce for one."
    ),
]
ClaimSize = Annotated[
    Quantity,
    Meta(
        description='Size of the PVC, for example "100Gi". Default: derived from '
        "sizePerGPU, otherwise 10Gi."
    ),
]
SizePerGpu = Annotated[
    Quantity, Meta(description="Size of the PVC for each GPU of the job (at least one).")
]
SharedClaim = Annotated[ObjectName, Meta(description="Existing PVC that jobs share.")]


HostPath = Annotated[
    MountPath,
    Meta(
        description="Directory on the machines for checkpoints, instead of a PVC: "
        "<hostPath>/<namespace>/<job>. size is the space that a pod may need "
        "there. A new gang prefers the machines of the previous one, then those "
        "with the most free local storage. The namespace must allow hostPath "
        "volumes."
    ),
]


class LocalObjectReference(Wire, frozen=True, kw_only=True):
    """An object in the same namespace."""

    name: Annotated[ObjectName, Meta(description="Name of the object.")]


ONE_SIZE = Rule(
    "!has(self.size) || !has(self.sizePerGPU)",
    "size and sizePerGPU are mutually exclusive",
)
EXISTING_CLAIM = Rule(
    "!has(self.claimName) || !(has(self.size) || has(self.sizePerGPU)"
    " || has(self.storageClassName))",
    "size, sizePerGPU and storageClassName must not be set with claimName, which is an existing"
    " PVC",
)


LOCAL_CHECKPOINTS = Rule(
    "!has(self.hostPath) || !(has(self.claimName) || has(self.storageClassName)"
    " || has(self.accessMode))",
    "claimName, storageClassName and accessMode must not be set with hostPath, which needs no PVC",
)


class Distributed(Wire, frozen=True, kw_only=True):
    """How the ranks find each other. Fields of a job override those of its queue."""

    backend: Annotated[
        Literal["nccl", "gloo", "mpi", "ucc"] | None,
        Meta(
            description="Backend of torch.distributed. Ranks read it from TORCHRUN_BACKEND. "
            "Default: nccl on GPUs, gloo on CPUs."
        ),
    ] = None
    rdzv_backend: Annotated[
        RdzvBackend | None,
        Meta(
            description="Rendezvous backend of torchrun. Default: static for jobs of a fixed "
            "size, c10d for elastic jobs. etcd-v2 and etcd need rdzvEndpoint "
            "or a default endpoint of the controller; without one, the job uses the default "
            "backend, and a condition says so."
        ),
    ] = None
    rdzv_endpoint: Annotated[
        Endpoint | None, Meta(description="host:port of the rendezvous. Default: the first pod.")
    ] = None
    port: Annotated[
        Port | None, Meta(description="Port of the rendezvous and of the master. Default: 29500.")
    ] = None
    nproc_per_node: Annotated[
        ProcessCount | None,
        Meta(
            description="Processes on each node. Default: the number of its GPUs, or 1 without "
            "GPUs."
        ),
    ] = None
    max_restarts: Annotated[
        RestartCount | None,
        Meta(description="Restarts of the processes by torchrun inside the pods. Default: 0."),
    ] = None


class Dataset(Wire, frozen=True, kw_only=True):
    """An existing PVC that is mounted into every pod."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=50,
            pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            description="Name of the dataset. A dataset of a job replaces that of its queue "
            "with the same name.",
        ),
    ]
    claim_name: Annotated[ObjectName, Meta(description="Name of the PVC, in the job's namespace.")]
    mount_path: Annotated[MountPath, Meta(description="Mount path in the pods.")]
    read_only: Annotated[bool, Meta(description="Mounts the PVC read-only.")] = True


class CheckpointsOverride(Wire, frozen=True, kw_only=True):
    """Checkpoint storage of the job. Unset fields default to the queue's."""

    RULES: ClassVar[tuple[Rule, ...]] = (ONE_SIZE, EXISTING_CLAIM, LOCAL_CHECKPOINTS)

    enabled: (
        Annotated[bool, Meta(description="Whether the job has a PVC for checkpoints.")] | None
    ) = None
    size: ClaimSize | None = None
    size_per_gpu: SizePerGpu | None = field(default=None, name="sizePerGPU")
    storage_class_name: StorageClassName | None = None
    access_mode: ClaimAccessMode | None = None
    claim_name: SharedClaim | None = None
    host_path: HostPath | None = None
    mount_path: Annotated[MountPath, Meta(description="Mount path in the pods.")] | None = None
    retain: Annotated[bool, Meta(description="Keeps the PVC when the job is deleted.")] | None = (
        None
    )


class PodTemplate(Wire, frozen=True, kw_only=True):
    """Merged into the pods by the strategic merge rules of Kubernetes (containers by name).

    The training container is named `trainer`.
    """

    metadata: Annotated[Embedded, Meta(description="Labels and annotations of the pods.")] = field(
        default_factory=dict
    )
    spec: Annotated[Embedded, Meta(description="v1 PodSpec with the fields to set.")] = field(
        default_factory=dict
    )
