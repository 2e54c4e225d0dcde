"""The parts of objects that the plugin reads.

Smaller and less strict than the controller's types, so that logs work with phases and fields that
are newer than the plugin.
"""

from datetime import datetime
from typing import Generic, TypeVar

from msgspec import Raw, Struct, field

from torchrun_api.json import JsonValue
from torchrun_api.kinds.core import PersistentVolumeClaim, Pod
from torchrun_api.kinds.kind import Kind
from torchrun_api.kinds.meta import Condition, ObjectMeta, Wire
from torchrun_api.kinds.status import TERMINAL
from torchrun_api.names import UP_TO_DATE

T = TypeVar("T")


class WorkspaceSlice(Wire, frozen=True, kw_only=True):
    """The source of the code."""

    enabled: bool = True
    source: str = "zip"
    claim_name: str = ""
    delivery: str | None = None


class VolumesSlice(Wire, frozen=True, kw_only=True):
    """The job's workspace, if it has one."""

    workspace: WorkspaceSlice | None = None


class ElasticSlice(Wire, frozen=True, kw_only=True):
    """The size limits of an elastic job."""

    min_nodes: int = 1
    max_nodes: int = 1


class DistributedSlice(Wire, frozen=True, kw_only=True):
    """Processes per node; None if not set."""

    nproc_per_node: int | str | None = None


class OwnNodeSlice(Wire, frozen=True, kw_only=True):
    """Resources of a node that a job sets; None: those of the queue."""

    gpus: int | None = None


class HeadSlice(Wire, frozen=True, kw_only=True):
    """Node 0, if it has its own pod template."""

    node_resources: OwnNodeSlice = OwnNodeSlice()


class PlacementSlice(Wire, frozen=True, kw_only=True):
    """The nodes that pods may use: fields of a v1 PodSpec."""

    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, JsonValue], ...] = ()
    affinity: dict[str, JsonValue] | None = None


class JobSpecSlice(Wire, frozen=True, kw_only=True):
    """The spec of a job."""

    job_queue: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = field(default=None, name="numGPUs")
    elastic: ElasticSlice | None = None
    head: HeadSlice | None = None
    image: str | None = None
    suspend: bool = False
    development: bool = False
    distributed: DistributedSlice = DistributedSlice()
    volumes: VolumesSlice = VolumesSlice()
    scheduling: PlacementSlice = PlacementSlice()


class FailureSlice(Wire, frozen=True, kw_only=True):
    """The root cause of a failure."""

    node: str = ""
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    message: str = ""


class AttemptSlice(Wire, frozen=True, kw_only=True):
    """A gang that ended, or a round of it after which the ranks started again."""

    number: int = 0
    round: int | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    running_seconds: int = 0
    reason: str = ""
    message: str = ""


class ProgressSlice(Wire, frozen=True, kw_only=True):
    """The progress that rank 0 reports."""

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    time: datetime | None = None


class CheckpointSlice(Wire, frozen=True, kw_only=True):
    """A complete checkpoint."""

    step: int = 0
    path: str = ""
    time: datetime | None = None


class NetworkSlice(Wire, frozen=True, kw_only=True):
    """A network that NCCL uses on some nodes. device: of Socket or libfabric, else empty."""

    transport: str = ""
    device: str = ""
    nodes: int = 0


class JobAdmissionSlice(Wire, frozen=True, kw_only=True):
    """The nodes that are admitted in the job's queue."""

    nodes: int = 0


class JobStatusSlice(Wire, frozen=True, kw_only=True):
    """The status of a job."""

    phase: str = ""
    observed_generation: int = 0
    reason: str = ""
    message: str = ""
    workers: dict[str, JsonValue] | None = None
    workers_status: str = ""
    num_nodes: int | None = None
    gpus: int | None = None
    progress: ProgressSlice | None = None
    estimated_remaining_seconds: int | None = None
    last_checkpoint: CheckpointSlice | None = None
    network: tuple[NetworkSlice, ...] = ()
    attempt: int = 0
    conditions: tuple[Condition, ...] = ()
    last_failure: FailureSlice | None = None
    restarts: int = 0
    restarts_in_place: int = 0
    disruptions: int = 0
    attempts: tuple[AttemptSlice, ...] = ()
    workspace_revision: int = 0
    workspace_commit: str = ""
    admission: JobAdmissionSlice = JobAdmissionSlice()
    queue_position: int | None = None
    start_time: datetime | None = None
    completion_time: datetime | None = None


class JobSlice(Wire, frozen=True, kw_only=True):
    """A TorchrunJob."""

    metadata: ObjectMeta = ObjectMeta()
    spec: JobSpecSlice = JobSpecSlice()
    status: JobStatusSlice = JobStatusSlice()

    @property
    def workspace_ready(self) -> bool:
        """Whether pods can get the code."""
        return any(
            c.type == "WorkspaceReady" and c.status == "True" for c in self.status.conditions
        )

    @property
    def up_to_date(self) -> Condition | None:
        """The condition about code that is newer than that of the pods; None without one."""
        return next((c for c in self.status.conditions if c.type == UP_TO_DATE), None)

    @property
    def is_delivered_directly(self) -> bool:
        """Whether pods get the code from a pod that serves it, and mount no workspace PVC."""
        return any(
            c.type == "WorkspaceReady" and c.reason == "DirectDelivery"
            for c in self.status.conditions
        )

    @property
    def has_started(self) -> bool:
        """Whether the job has had a gang, or is admitted for one: then its size is fixed.

        As in the rules of the CRD, see `torchrun_api.kinds.job`. The phase does not show it.
        """
        return self.status.workers is not None or self.status.admission.nodes > 0

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.status.phase in TERMINAL


class NodeSlice(Wire, frozen=True, kw_only=True):
    """Resources of a node of a queue."""

    gpus: int = 0
    gpu_resource_name: str = "nvidia.com/gpu"


class SchedulingSlice(PlacementSlice, frozen=True, kw_only=True):
    """The scheduler of a queue, and its nodes."""

    scheduler: str | None = None


class NameSlice(Wire, frozen=True, kw_only=True):
    """A reference by name."""

    name: str = ""


class StorageClassSlice(Wire, frozen=True, kw_only=True):
    """The PVC template of a queue."""

    enabled: bool = True
    storage_class_name: str | None = None
    access_mode: str | None = None


class StorageSlice(Wire, frozen=True, kw_only=True):
    """PVC templates of a queue."""

    workspace: StorageClassSlice | None = None
    checkpoints: StorageClassSlice | None = None


class QueueSpecSlice(Wire, frozen=True, kw_only=True):
    """The spec of a queue."""

    image: str | None = None
    image_pull_secrets: tuple[NameSlice, ...] = ()
    node_resources: NodeSlice = NodeSlice()
    scheduling: SchedulingSlice = SchedulingSlice()
    distributed: DistributedSlice = DistributedSlice()
    storage: StorageSlice = StorageSlice()
    weight: float | None = None
    quota: dict[str, JsonValue] = field(default_factory=dict)


class QueueAdmissionSlice(Wire, frozen=True, kw_only=True):
    """Quota that admitted jobs use, and free quota."""

    summary: str = ""
    used: dict[str, JsonValue] = field(default_factory=dict)
    free: dict[str, JsonValue] = field(default_factory=dict)


class QueueStatusSlice(Wire, frozen=True, kw_only=True):
    """The status of a queue."""

    admission: QueueAdmissionSlice | None = None


class QueueSlice(Wire, frozen=True, kw_only=True):
    """A TorchrunQueue."""

    metadata: ObjectMeta = ObjectMeta()
    spec: QueueSpecSlice = QueueSpecSlice()
    status: QueueStatusSlice = QueueStatusSlice()


class ListMeta(Wire, frozen=True, kw_only=True):
    """Metadata of a list; a watch starts at its resource version."""

    resource_version: str = ""


class Listed(Wire, Generic[T], frozen=True, kw_only=True):
    """A list of the API server.

    unreadable: a line for each object that cannot be decoded and is missing in `items`.
    """

    metadata: ListMeta = ListMeta()
    items: tuple[T, ...] = ()
    unreadable: tuple[str, ...] = ()


class NamedSlice(Wire, frozen=True, kw_only=True):
    """An object without fields except its name."""

    metadata: NameSlice = NameSlice()


class WatchEvent(Struct, frozen=True):
    """One event of a watch."""

    type: str
    object: Raw


class InvalidField(Wire, frozen=True, kw_only=True):
    """One invalid field."""

    field: str = ""
    message: str = ""


class StatusDetails(Wire, frozen=True, kw_only=True):
    """The details of an error."""

    name: str = ""
    kind: str = ""
    causes: tuple[InvalidField, ...] = ()
    retry_after_seconds: int = 0


class Status(Wire, frozen=True, kw_only=True):
    """metav1.Status: an error of the API server."""

    kind: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    details: StatusDetails = field(default=StatusDetails())


JOBS = Kind("torchrun.ai", "v1alpha1", "torchrunjobs", "TorchrunJob", JobSlice)
QUEUES = Kind("torchrun.ai", "v1alpha1", "torchrunqueues", "TorchrunQueue", QueueSlice)
PODS = Kind("", "v1", "pods", "Pod", Pod)
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", PersistentVolumeClaim)
