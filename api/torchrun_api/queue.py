"""TorchrunQueue: how the jobs of a queue run."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.meta import Condition, ObjectMeta, Wire
from torchrun_api.schema import Embedded, Quantity, Rule
from torchrun_api.shared import (
    AccessMode,
    Dataset,
    Distributed,
    ImageName,
    LabelValue,
    MountPath,
    ObjectName,
    PodTemplate,
    StringMap,
)


class NodeResources(Wire, frozen=True, kw_only=True):
    """What one node, that is one pod, requests. A job on part of a node's GPUs gets CPU and memory pro rata."""

    gpus: Annotated[int, Meta(ge=0, le=1024, description="GPUs on each node; 0 for CPU jobs.")] = 0
    cpus: Annotated[Quantity, Meta(description='CPUs on each node, as 96 or "500m".')] | None = None
    memory: Annotated[Quantity, Meta(description='Memory on each node, as "512Gi".')] | None = None
    gpu_type: Annotated[
        LabelValue | None,
        Meta(
            description="Becomes the label torchrun.ai/gpu-type of the pods; select nodes by nodeSelector."
        ),
    ] = None
    gpu_resource_name: Annotated[
        str, Meta(min_length=1, max_length=253, description="Extended resource of one GPU.")
    ] = "nvidia.com/gpu"
    extra: Annotated[
        dict[str, Quantity],
        Meta(max_length=32, description="Further resources of each node, as RDMA devices."),
    ] = field(default_factory=dict)


class WorkspaceStorage(Wire, frozen=True, kw_only=True):
    """A claim for each job that holds its code; it goes with the job unless retained."""

    enabled: bool = True
    size: Annotated[Quantity, Meta(description="Size of the claim. Default: 10Gi.")] | None = None
    size_per_gpu: Annotated[
        Quantity | None,
        Meta(description="Size of the claim for each GPU of the job (at least one)."),
    ] = field(default=None, name="sizePerGPU")
    storage_class_name: ObjectName | None = None
    access_mode: Annotated[
        AccessMode | None,
        Meta(description="Default: ReadWriteMany for several nodes, else ReadWriteOnce."),
    ] = None
    mount_path: Annotated[MountPath, Meta(description="Where workers find their copy.")] = "/app"
    retain: bool = False


class CheckpointStorage(Wire, frozen=True, kw_only=True):
    """A claim that outlives the job; a job of the same name takes it up again."""

    enabled: bool = True
    size: Annotated[Quantity, Meta(description="Size of the claim. Default: 10Gi.")] | None = None
    size_per_gpu: Annotated[
        Quantity | None,
        Meta(description="Size of the claim for each GPU of the job (at least one)."),
    ] = field(default=None, name="sizePerGPU")
    storage_class_name: ObjectName | None = None
    access_mode: Annotated[
        AccessMode | None,
        Meta(description="Default: ReadWriteMany for several nodes, else ReadWriteOnce."),
    ] = None
    claim_name: (
        Annotated[ObjectName, Meta(description="A claim that exists already, shared between jobs.")]
        | None
    ) = None
    mount_path: MountPath = "/checkpoints"
    retain: bool = True


class Storage(Wire, frozen=True, kw_only=True):
    """Volumes of the queue's jobs."""

    workspace: WorkspaceStorage | None = None
    checkpoints: CheckpointStorage | None = None
    datasets: Annotated[tuple[Dataset, ...], Meta(max_length=32)] = ()
    shm_size_per_gpu: Annotated[
        Quantity | None,
        Meta(description="/dev/shm of each worker, for each of its GPUs (at least one)."),
    ] = field(default=None, name="shmSizePerGPU")


class QueueScheduling(Wire, frozen=True, kw_only=True):
    """Where and by whom the pods are scheduled."""

    scheduler: Annotated[ObjectName | None, Meta(description="schedulerName of the pods.")] = None
    priority_class_name: ObjectName | None = None
    node_selector: StringMap = field(default_factory=dict)
    tolerations: Annotated[tuple[Embedded, ...], Meta(max_length=64)] = ()
    affinity: Embedded | None = None


class Networking(Wire, frozen=True, kw_only=True):
    """Network of the pods."""

    host_network: bool = False


class LocalObjectReference(Wire, frozen=True, kw_only=True):
    """An object of the same namespace."""

    name: ObjectName


class TorchrunQueueSpec(Wire, frozen=True, kw_only=True):
    """A template for jobs. A change applies to jobs that start later."""

    kai_queue: Annotated[ObjectName | None, Meta(description="KAI queue this maps to.")] = None
    parent_kai_queue: Annotated[ObjectName | None, Meta(description="Parent of the KAI queue.")] = (
        None
    )
    node_resources: NodeResources = NodeResources()
    image: Annotated[ImageName | None, Meta(description="Image of the training container.")] = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: Annotated[tuple[LocalObjectReference, ...], Meta(max_length=16)] = ()
    service_account_name: ObjectName | None = None
    storage: Storage = Storage()
    scheduling: QueueScheduling = QueueScheduling()
    distributed: Distributed = Distributed()
    working_dir: Annotated[
        MountPath | None,
        Meta(description="Working directory of the command. Default: the workspace's mountPath."),
    ] = None
    security_context: (
        Annotated[Embedded, Meta(description="securityContext of the training container.")] | None
    ) = None
    networking: Networking = Networking()
    pod_template: PodTemplate = PodTemplate()


class TorchrunQueueStatus(Wire, frozen=True, kw_only=True):
    """What the controller says of the queue."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()


class TorchrunQueue(Wire, frozen=True, kw_only=True):
    """torchrun.ai/v1alpha1 TorchrunQueue."""

    RULES: ClassVar[tuple[Rule, ...]] = ()

    metadata: ObjectMeta = ObjectMeta()
    spec: TorchrunQueueSpec = TorchrunQueueSpec()
    status: TorchrunQueueStatus = TorchrunQueueStatus()
    invalid: Annotated[
        str, Meta(description="Why the spec could not be read; never on the wire.")
    ] = field(default="", name="__invalid__")
