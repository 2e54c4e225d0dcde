"""TorchrunQueue: a template for jobs."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, get_args

from msgspec import Meta, field

from torchrun_api.kinds.admission import (
    JobLimits,
    JobPriority,
    QueueAdmission,
    QueueJobs,
    Quota,
    Topology,
    Weight,
)
from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS, GangScheduling
from torchrun_api.kinds.meta import Condition, ObjectMeta, Wire
from torchrun_api.kinds.reliability import Reliability
from torchrun_api.kinds.schema import (
    BY_NAME,
    BY_TYPE,
    Embedded,
    Quantity,
    RemovedField,
    Rule,
    one_of,
)
from torchrun_api.kinds.shared import (
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
from torchrun_api.names import MAX_LABEL

PodSecurity = Literal["baseline", "restricted"]


class NodeResources(Wire, frozen=True, kw_only=True):
    """Resource requests of one node, that is of one pod.

    A job that uses only some of these GPUs gets a proportional share of CPU and memory.
    """

    gpus: Annotated[int, Meta(ge=0, le=1024, description="GPUs of each node. 0 for CPU jobs.")] = 0
    cpus: (
        Annotated[Quantity, Meta(description='CPUs of each node, for example 96 or "500m".')] | None
    ) = None
    memory: (
        Annotated[Quantity, Meta(description='Memory of each node, for example "512Gi".')] | None
    ) = None
    gpu_type: Annotated[
        LabelValue | None,
        Meta(
            description="Value of the pod label torchrun.ai/gpu-type. It does not select machines;"
            " nodeSelector does."
        ),
    ] = None
    gpu_resource_name: Annotated[
        str,
        Meta(
            min_length=1, max_length=253, description="Extended resource that stands for one GPU."
        ),
    ] = "nvidia.com/gpu"
    extra: Annotated[
        dict[str, Quantity],
        Meta(
            max_length=32,
            description="Additional resources of each node, for example RDMA devices.",
        ),
    ] = field(default_factory=dict)


class WorkspaceStorage(Wire, frozen=True, kw_only=True):
    """A PVC for the code of each job. It is deleted with the job unless it is retained."""

    RULES: ClassVar[tuple[Rule, ...]] = (ONE_SIZE,)

    enabled: Annotated[bool, Meta(description="Whether jobs may have a workspace.")] = True
    size: ClaimSize | None = None
    size_per_gpu: SizePerGpu | None = field(default=None, name="sizePerGPU")
    storage_class_name: StorageClassName | None = None
    access_mode: ClaimAccessMode | None = None
    mount_path: Annotated[
        MountPath, Meta(description="Mount path of the workspace in the pods.")
    ] = "/app"
    delivery: Delivery = "auto"
    retain: Annotated[bool, Meta(description="Keeps the PVC when the job is deleted.")] = False


class CheckpointStorage(Wire, frozen=True, kw_only=True):
    """A PVC that outlives the job. A job with the same name uses it again."""

    RULES: ClassVar[tuple[Rule, ...]] = (ONE_SIZE, EXISTING_CLAIM, LOCAL_CHECKPOINTS)

    enabled: Annotated[bool, Meta(description="Whether jobs have a PVC for checkpoints.")] = True
    size: ClaimSize | None = None
    size_per_gpu: SizePerGpu | None = field(default=None, name="sizePerGPU")
    storage_class_name: StorageClassName | None = None
    access_mode: ClaimAccessMode | None = None
    claim_name: SharedClaim | None = None
    host_path: HostPath | None = None
    mount_path: Annotated[MountPath, Meta(description="Mount path in the pods.")] = "/checkpoints"
    retain: Annotated[bool, Meta(description="Keeps the PVC when the job is deleted.")] = True


class Storage(Wire, frozen=True, kw_only=True):
    """Volumes of the queue's jobs."""

    workspace: WorkspaceStorage | None = None
    checkpoints: CheckpointStorage | None = None
    datasets: Annotated[
        tuple[Dataset, ...],
        Meta(
            max_length=32,
            description="Existing PVCs that are mounted into every pod.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    shm_size_per_gpu: Annotated[
        Quantity | None,
        Meta(description="Size of /dev/shm in each pod for each of its GPUs (at least one)."),
    ] = field(default=None, name="shmSizePerGPU")


class QueueScheduling(Wire, frozen=True, kw_only=True):
    """Scheduler of the pods and the machines that they may use."""

    RULES: ClassVar[tuple[Rule, ...]] = tuple(
        Rule(
            f"!has(self.gang) || self.gang != '{scheduler.name}' || !has(self.queueName)"
            f" || self.queueName.size() <= {MAX_LABEL}",
            f"queueName must be no more than {MAX_LABEL} characters with gang {scheduler.name},"
            " because it is a label value",
        )
        for scheduler in GANG_SCHEDULERS.values()
        if scheduler.queue_label
    )

    scheduler: Annotated[SchedulerName | None, Meta(description="schedulerName of the pods.")] = (
        None
    )
    gang: Annotated[
        GangScheduling | None,
        Meta(
            description="Gang scheduler that starts either all pods of a gang or none. Default:"
            " the one that schedulerName names, else native if the API server serves it, "
            "else none."
        ),
    ] = None
    queue_name: Annotated[
        ObjectName | None,
        Meta(
            description="Queue of the gang scheduler: a LocalQueue for Kueue (default: the name"
            " of this queue) or a Queue for Volcano (default: default)."
        ),
    ] = None
    topology: Topology | None = None
    priority_class_name: PriorityClassName | None = None
    node_selector: NodeSelector = field(default_factory=dict)
    tolerations: Tolerations = ()
    affinity: Affinity | None = None


class Networking(Wire, frozen=True, kw_only=True):
    """Network settings of the pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.isolate) && self.isolate && has(self.hostNetwork) && self.hostNetwork)",
            "isolate and hostNetwork are mutually exclusive: a NetworkPolicy does not apply to"
            " pods in the host network",
        ),
    )

    host_network: Annotated[bool, Meta(description="Uses the network of the machine.")] = False
    isolate: Annotated[
        bool,
        Meta(
            description="Only pods of the same job may connect to its pods. A NetworkPolicy for"
            " each job enforces this and needs a network plugin that supports it."
        ),
    ] = False


class TorchrunQueueSpec(Wire, frozen=True, kw_only=True):
    """A template for jobs. A change applies to jobs that start later."""

    REMOVED: ClassVar[tuple[RemovedField, ...]] = (
        RemovedField(
            "resources",
            "objects",
            "Apply PVCs and ConfigMaps beside the queue, for example with kustomize.",
        ),
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.podSecurity) || !has(self.networking) || !has(self.networking.hostNetwork)"
            " || !self.networking.hostNetwork",
            "networking.hostNetwork and podSecurity are mutually exclusive",
        ),
        Rule(
            "!has(self.podSecurity) || !has(self.storage) || !has(self.storage.checkpoints)"
            " || !has(self.storage.checkpoints.hostPath)",
            "storage.checkpoints.hostPath and podSecurity are mutually exclusive",
        ),
        Rule(
            "!has(self.priority) || !has(self.limits) || !has(self.limits.maxPriority)"
            " || self.priority <= self.limits.maxPriority",
            "priority must be less than or equal to limits.maxPriority",
        ),
    )

    kai_queue: Annotated[
        LabelledName | None,
        Meta(
            description="KAI queue of the jobs. If KAI is installed, the queue is created for "
            "the oldest TorchrunQueue that names it. An existing queue is used "
            "unchanged. At most 63 characters, because pods name the queue in a "
            "label."
        ),
    ] = None
    parent_kai_queue: Annotated[
        ObjectName | None,
        Meta(
            description='Parent of the KAI queue. Default: "default" if that queue exists, '
            'otherwise "default-parent-queue". Other parents require that the '
            "controller's --kai-quota-namespaces lists the namespace."
        ),
    ] = None
    node_resources: NodeResources = NodeResources()
    image: Annotated[ImageName | None, Meta(description="Image of the training container.")] = None
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None,
        Meta(description="Pull policy of the image. Default: that of Kubernetes."),
    ] = None
    image_pull_secrets: Annotated[
        tuple[LocalObjectReference, ...],
        Meta(
            max_length=16,
            description="Secrets for pulling the image.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    service_account_name: Annotated[
        ObjectName | None, Meta(description="ServiceAccount of the pods.")
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
                description="securityContext of the training container. It overrides what jobs set."
                " Defaults: no privilege escalation, seccomp profile RuntimeDefault, "
                "capabilities MKNOD and NET_RAW dropped."
            ),
        ]
        | None
    ) = None
    pod_security: Annotated[
        PodSecurity | None,
        Meta(
            description="Level of the Pod Security Standards that the pods must meet. A job "
            "that violates it is rejected. restricted also sets what the level "
            "requires: user and group 65532 (fsGroup too, so that PVCs are "
            "writable) and no capabilities."
        ),
    ] = None
    networking: Networking = Networking()
    pod_template: PodTemplate = PodTemplate()
    reliability: Reliability = Reliability()
    quota: Quota | None = None
    weight: Weight | None = None
    priority: Annotated[JobPriority, Meta(description="Default priority of jobs.")] = 0
    cohort: Annotated[
        ObjectName | None,
        Meta(
            description="Queues with the same cohort lend each other unused quota and reclaim "
            "it when they need it. Queues of different namespaces share a cohort "
            "only if the controller's --cohort-namespaces lists these namespaces."
        ),
    ] = None
    limits: JobLimits = JobLimits()


QueuePhase = Literal["Active", "Updating", "Terminating"]
if TYPE_CHECKING:
    StatusQueuePhase: TypeAlias = QueuePhase
    StatusGang: TypeAlias = GangScheduling
else:
    StatusQueuePhase = Annotated[str, one_of(*get_args(QueuePhase))]
    StatusGang = Annotated[str, one_of(*get_args(GangScheduling))]


class TorchrunQueueStatus(Wire, frozen=True, kw_only=True):
    """State of the queue."""

    observed_generation: Annotated[
        int, Meta(description="Generation of the spec that this status describes.")
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(description="metav1 conditions.", extra_json_schema=BY_TYPE),
    ] = ()
    phase: Annotated[
        StatusQueuePhase | None,
        Meta(
            description="Active: the queue accepts jobs. Updating: the last change is not in "
            "use yet; see the conditions. Terminating: the queue is deleted when "
            "its running jobs have ended."
        ),
    ] = None
    gang: Annotated[StatusGang | None, Meta(description="Gang scheduler in use.")] = None
    jobs: QueueJobs | None = None
    admission: QueueAdmission | None = None


class TorchrunQueue(Wire, frozen=True, kw_only=True):
    """A TorchrunQueue is a template for jobs: node resources, image, storage and scheduling.

    Jobs name it in spec.jobQueue and may override parts of it.
    """

    RULES: ClassVar[tuple[Rule, ...]] = tuple(
        Rule(
            "!has(self.spec.scheduling) || !has(self.spec.scheduling.gang)"
            f" || self.spec.scheduling.gang != '{scheduler.name}'"
            " || has(self.spec.scheduling.queueName)"
            f" || self.metadata.name.size() <= {MAX_LABEL}",
            f"metadata.name must be no more than {MAX_LABEL} characters with scheduling.gang"
            f" {scheduler.name}, because it is a label value: set scheduling.queueName to the"
            " LocalQueue or choose a shorter name",
        )
        for scheduler in GANG_SCHEDULERS.values()
        if scheduler.queue_label
    )
    REQUIRED: ClassVar[tuple[str, ...]] = ("spec",)

    metadata: ObjectMeta = ObjectMeta()
    spec: TorchrunQueueSpec = TorchrunQueueSpec()
    status: TorchrunQueueStatus = TorchrunQueueStatus()
    invalid: Annotated[
        str, Meta(description="Why the spec could not be read; never on the wire.")
    ] = field(default="", name="__invalid__")
    incomplete: Annotated[
        bool, Meta(description="Whether the status could not be read either; never on the wire.")
    ] = field(default=False, name="__incomplete__")
