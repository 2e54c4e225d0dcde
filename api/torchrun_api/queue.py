"""TorchrunQueue: how the jobs of a queue run."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.admission import (
    GangScheduling,
    JobPriority,
    Limits,
    QueueAdmission,
    QueueJobs,
    QueueResource,
    QueueResourceStatus,
    Quota,
    Topology,
    Weight,
)
from torchrun_api.meta import Condition, ObjectMeta, Wire
from torchrun_api.names import MAX_LABEL
from torchrun_api.reliability import Reliability
from torchrun_api.schema import BY_NAME, BY_TYPE, Embedded, Quantity, Rule
from torchrun_api.shared import (
    EXISTING_CLAIM,
    LOCAL_CHECKPOINTS,
    ONE_SIZE,
    Affinity,
    ClaimAccessMode,
    ClaimSize,
    Dataset,
    Delivery,
    Distributed,
    HostPath,
    ImageName,
    LabelledName,
    LabelValue,
    LocalObjectReference,
    MountPath,
    NodeSelector,
    ObjectName,
    PodTemplate,
    PriorityClassName,
    SchedulerName,
    SharedClaim,
    SizePerGpu,
    StorageClassName,
    Tolerations,
)

PodSecurity = Literal["baseline", "restricted"]


class NodeResources(Wire, frozen=True, kw_only=True):
    """What one node, that is one pod, requests.

    A job that uses part of a node's GPUs gets CPU and memory pro rata.
    """

    gpus: Annotated[int, Meta(ge=0, le=1024, description="GPUs on each node; 0 for CPU jobs.")] = 0
    cpus: Annotated[Quantity, Meta(description='CPUs on each node, as 96 or "500m".')] | None = None
    memory: Annotated[Quantity, Meta(description='Memory on each node, as "512Gi".')] | None = None
    gpu_type: Annotated[
        LabelValue | None,
        Meta(
            description="Becomes the label torchrun.ai/gpu-type of the pods; "
            "nodes are selected by nodeSelector."
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

    RULES: ClassVar[tuple[Rule, ...]] = (ONE_SIZE,)

    enabled: Annotated[bool, Meta(description="Whether jobs may have a workspace.")] = True
    size: ClaimSize | None = None
    size_per_gpu: SizePerGpu | None = field(default=None, name="sizePerGPU")
    storage_class_name: StorageClassName | None = None
    access_mode: ClaimAccessMode | None = None
    mount_path: Annotated[MountPath, Meta(description="Where workers find their copy.")] = "/app"
    delivery: Delivery = "auto"
    retain: Annotated[bool, Meta(description="Keep the claim when the job is deleted.")] = False


class CheckpointStorage(Wire, frozen=True, kw_only=True):
    """A claim that outlives the job; a job of the same name takes it up again."""

    RULES: ClassVar[tuple[Rule, ...]] = (ONE_SIZE, EXISTING_CLAIM, LOCAL_CHECKPOINTS)

    enabled: Annotated[bool, Meta(description="Whether there is a claim.")] = True
    size: ClaimSize | None = None
    size_per_gpu: SizePerGpu | None = field(default=None, name="sizePerGPU")
    storage_class_name: StorageClassName | None = None
    access_mode: ClaimAccessMode | None = None
    claim_name: SharedClaim | None = None
    host_path: HostPath | None = None
    mount_path: Annotated[MountPath, Meta(description="Where workers find it.")] = "/checkpoints"
    retain: Annotated[bool, Meta(description="Keep the claim when the job is deleted.")] = True


class Storage(Wire, frozen=True, kw_only=True):
    """Volumes of the queue's jobs."""

    workspace: WorkspaceStorage | None = None
    checkpoints: CheckpointStorage | None = None
    datasets: Annotated[
        tuple[Dataset, ...],
        Meta(
            max_length=32,
            description="Claims that exist already, mounted into every worker.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    shm_size_per_gpu: Annotated[
        Quantity | None,
        Meta(description="Shared memory of each worker, for each of its GPUs (at least one)."),
    ] = field(default=None, name="shmSizePerGPU")


class QueueScheduling(Wire, frozen=True, kw_only=True):
    """Where and by whom the pods are scheduled."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.gang) || self.gang != 'kueue' || !has(self.queueName)"
            f" || self.queueName.size() <= {MAX_LABEL}",
            f"queueName may have at most {MAX_LABEL} characters for gang kueue:"
            " Kueue reads it from a label",
        ),
    )

    scheduler: Annotated[SchedulerName | None, Meta(description="schedulerName of the pods.")] = (
        None
    )
    gang: Annotated[
        GangScheduling | None,
        Meta(
            description="Who sees to it that all workers of a gang start together or none does. "
            "Default: by the scheduler's name and by what is installed."
        ),
    ] = None
    queue_name: Annotated[
        ObjectName | None,
        Meta(
            description="Queue of the gang scheduler: Kueue's LocalQueue (default: the name of "
            "this queue) or Volcano's Queue (default: default)."
        ),
    ] = None
    topology: Topology | None = None
    priority_class_name: PriorityClassName | None = None
    node_selector: NodeSelector = field(default_factory=dict)
    tolerations: Tolerations = ()
    affinity: Affinity | None = None


class Networking(Wire, frozen=True, kw_only=True):
    """Network of the pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.isolate) && self.isolate && has(self.hostNetwork) && self.hostNetwork)",
            "isolate contradicts hostNetwork, whose pods no NetworkPolicy selects:"
            " leave one of them out",
        ),
    )

    host_network: Annotated[bool, Meta(description="Use the node's network.")] = False
    isolate: Annotated[
        bool,
        Meta(
            description="Only pods of the same job may connect to a worker: by a NetworkPolicy for "
            "each job, which needs a network plugin that enforces it."
        ),
    ] = False


class TorchrunQueueSpec(Wire, frozen=True, kw_only=True):
    """A template for jobs. A change applies to jobs that start later."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.podSecurity) || !has(self.networking) || !has(self.networking.hostNetwork)"
            " || !self.networking.hostNetwork",
            "networking.hostNetwork contradicts podSecurity: leave one of them out",
        ),
        Rule(
            "!has(self.podSecurity) || !has(self.storage) || !has(self.storage.checkpoints)"
            " || !has(self.storage.checkpoints.hostPath)",
            "storage.checkpoints.hostPath contradicts podSecurity: leave one of them out",
        ),
        Rule(
            "!has(self.priority) || !has(self.limits) || !has(self.limits.maxPriority)"
            " || self.priority <= self.limits.maxPriority",
            "priority must not be above limits.maxPriority",
        ),
    )

    kai_queue: Annotated[
        LabelledName | None,
        Meta(
            description="KAI queue this maps to: made and kept for the eldest TorchrunQueue that "
            "names it, where KAI is installed. One that is there already is used as it is. Pods "
            "name it in a label, which holds 63 characters."
        ),
    ] = None
    parent_kai_queue: Annotated[
        ObjectName | None,
        Meta(
            description="Parent of the KAI queue. Unset: default where there is one, else "
            "default-parent-queue."
        ),
    ] = None
    node_resources: NodeResources = NodeResources()
    image: Annotated[ImageName | None, Meta(description="Image of the training container.")] = None
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None,
        Meta(description="When the image is pulled. Default: Kubernetes' own."),
    ] = None
    image_pull_secrets: Annotated[
        tuple[LocalObjectReference, ...],
        Meta(
            max_length=16,
            description="Secrets with which the image is pulled.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    service_account_name: Annotated[
        ObjectName | None, Meta(description="ServiceAccount of the workers.")
    ] = None
    storage: Storage = Storage()
    scheduling: QueueScheduling = QueueScheduling()
    distributed: Distributed = Distributed()
    working_dir: Annotated[
        MountPath | None,
        Meta(description="Working directory of the command. Default: the workspace's mountPath."),
    ] = None
    security_context: (
        Annotated[
            Embedded,
            Meta(
                description="securityContext of the training container, over what jobs set. What "
                "it leaves open: no privilege escalation, seccomp RuntimeDefault, capabilities "
                "MKNOD and NET_RAW dropped."
            ),
        ]
        | None
    ) = None
    pod_security: Annotated[
        PodSecurity | None,
        Meta(
            description="Level of the Pod Security Standards that the workers keep to: a job that "
            "asks for more is refused. restricted also fills in what the level demands: user and "
            "group 65532 (fsGroup too, so that claims can be written), all capabilities dropped."
        ),
    ] = None
    networking: Networking = Networking()
    pod_template: PodTemplate = PodTemplate()
    reliability: Reliability = Reliability()
    quota: Quota | None = None
    weight: Weight | None = None
    priority: Annotated[
        JobPriority, Meta(description="Priority of its jobs that name none of their own.")
    ] = 0
    cohort: Annotated[
        ObjectName | None,
        Meta(
            description="Queues of the namespace with the same cohort lend each other the quota "
            "that they do not use, and take it back when they need it. Across namespaces only "
            "between those that the controller's --cohort-namespaces names."
        ),
    ] = None
    limits: Limits = Limits()
    resources: Annotated[
        tuple[QueueResource, ...],
        Meta(
            max_length=16,
            description="Objects that are made, kept and deleted with the queue.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()


class TorchrunQueueStatus(Wire, frozen=True, kw_only=True):
    """How the queue stands."""

    observed_generation: Annotated[
        int, Meta(description="Generation of the spec that this status speaks of.")
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(description="metav1 conditions.", extra_json_schema=BY_TYPE),
    ] = ()
    phase: Annotated[
        Literal["Active", "Updating", "Terminating"] | None,
        Meta(
            description="Active: takes jobs. Updating: the last change cannot be used (yet), see "
            "the conditions. Terminating: it goes once its running jobs have ended."
        ),
    ] = None
    gang: Annotated[
        GangScheduling | None, Meta(description="How gangs of this queue are scheduled.")
    ] = None
    jobs: QueueJobs | None = None
    resources: Annotated[
        tuple[QueueResourceStatus, ...],
        Meta(description="The objects of spec.resources.", extra_json_schema=BY_NAME),
    ] = ()
    admission: QueueAdmission | None = None


class TorchrunQueue(Wire, frozen=True, kw_only=True):
    """A TorchrunQueue is the template of its jobs: resources of a node, image, storage, scheduling.

    Jobs name it in spec.jobQueue and may override part of it.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.spec.scheduling) || !has(self.spec.scheduling.gang)"
            " || self.spec.scheduling.gang != 'kueue' || has(self.spec.scheduling.queueName)"
            f" || self.metadata.name.size() <= {MAX_LABEL}",
            f"metadata.name may have at most {MAX_LABEL} characters for scheduling.gang kueue,"
            " as Kueue reads its LocalQueue's name from a label: set scheduling.queueName to the"
            " LocalQueue, or choose a shorter name",
        ),
    )
    REQUIRED: ClassVar[tuple[str, ...]] = ("spec",)

    metadata: ObjectMeta = ObjectMeta()
    spec: TorchrunQueueSpec = TorchrunQueueSpec()
    status: TorchrunQueueStatus = TorchrunQueueStatus()
    invalid: Annotated[
        str, Meta(description="Why the spec could not be read; never on the wire.")
    ] = field(default="", name="__invalid__")
