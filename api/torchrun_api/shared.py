"""Parts of a spec that stand in queues and in jobs alike; a job's value overrides its queue's."""

from typing import Annotated, Literal

from msgspec import Meta, field

from torchrun_api.meta import Wire
from torchrun_api.schema import Embedded, Quantity

AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
RdzvBackend = Literal["static", "c10d", "etcd-v2", "etcd"]

MountPath = Annotated[str, Meta(min_length=1, max_length=512, pattern="^/")]
ObjectName = Annotated[str, Meta(min_length=1, max_length=253)]
LabelValue = Annotated[str, Meta(max_length=63)]
ImageName = Annotated[str, Meta(min_length=1, max_length=1024)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=512)]
Port = Annotated[int, Meta(ge=1, le=65535)]
NodeCount = Annotated[int, Meta(ge=1, le=10000)]
GpuCount = Annotated[int, Meta(ge=1, le=100000)]
ProcessCount = Annotated[int, Meta(ge=1, le=1024)]
RestartCount = Annotated[int, Meta(ge=0, le=1000)]
StringMap = Annotated[dict[str, str], Meta(max_length=64)]


class Distributed(Wire, frozen=True, kw_only=True):
    """How the ranks find each other. All fields are optional; a job's value overrides its queue's."""

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
            description="torchrun's rendezvous. Default: static for a fixed size, c10d for elastic jobs. "
            "etcd-v2 and etcd need rdzvEndpoint; without one the default is used and said so."
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
        str, Meta(min_length=1, max_length=50, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    ]
    claim_name: ObjectName
    mount_path: MountPath
    read_only: bool = True


class CheckpointsOverride(Wire, frozen=True, kw_only=True):
    """The job's checkpoint storage; what is unset is the queue's."""

    enabled: bool | None = None
    size: Annotated[Quantity, Meta(description="Size of the claim.")] | None = None
    size_per_gpu: Annotated[
        Quantity | None,
        Meta(description="Size of the claim for each GPU of the job (at least one)."),
    ] = field(default=None, name="sizePerGPU")
    storage_class_name: ObjectName | None = None
    access_mode: AccessMode | None = None
    claim_name: (
        Annotated[ObjectName, Meta(description="A claim that exists already, shared between jobs.")]
        | None
    ) = None
    mount_path: MountPath | None = None
    retain: Annotated[bool, Meta(description="Keep the claim when the job is deleted.")] | None = (
        None
    )


class PodTemplate(Wire, frozen=True, kw_only=True):
    """Merged under the workers' pods by Kubernetes' strategic merge rules (containers by name).

    The container `trainer` is the training container.
    """

    metadata: Embedded = field(default_factory=dict)
    spec: Embedded = field(default_factory=dict)
