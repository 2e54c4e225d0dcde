"""TorchrunJob: one training run."""

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.meta import Condition, ObjectMeta, Wire
from torchrun_api.names import MAX_JOB_NAME
from torchrun_api.schema import Embedded, Quantity, Rule
from torchrun_api.shared import (
    AccessMode,
    CheckpointsOverride,
    Dataset,
    Distributed,
    GpuCount,
    ImageName,
    MountPath,
    NodeCount,
    ObjectName,
    PodTemplate,
    StringMap,
)

Phase = Literal[
    "Pending",
    "Syncing",
    "Queued",
    "Running",
    "Succeeded",
    "Failed",
    "Suspended",
    "TimedOut",
    "Preempted",
]
WorkspaceSource = Literal["zip", "none"]


class Elastic(Wire, frozen=True, kw_only=True):
    """The sizes between which the job may move; numNodes is the start."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minNodes <= self.maxNodes",
            "elastic.minNodes must not be larger than elastic.maxNodes",
        ),
    )

    min_nodes: NodeCount
    max_nodes: NodeCount


class JobScheduling(Wire, frozen=True, kw_only=True):
    """The job's overrides of its queue's scheduling."""

    priority_class_name: ObjectName | None = None
    node_selector: StringMap = field(default_factory=dict)
    tolerations: Annotated[tuple[Embedded, ...], Meta(max_length=64)] = ()
    affinity: Embedded | None = None


class WorkspaceVolume(Wire, frozen=True, kw_only=True):
    """Where the code comes from. Without this block (the plugin sets it) it is in the image."""

    enabled: bool = True
    source: Annotated[
        WorkspaceSource,
        Meta(
            description="zip: waits for an upload by kubectl torchrun. none: the code is in the image."
        ),
    ] = "zip"
    size: Annotated[Quantity, Meta(description="Size of the claim.")] | None = None
    storage_class_name: ObjectName | None = None
    access_mode: AccessMode | None = None
    mount_path: MountPath | None = None


class Volumes(Wire, frozen=True, kw_only=True):
    """Storage overrides and additions."""

    workspace: WorkspaceVolume | None = None
    checkpoints: CheckpointsOverride | None = None
    datasets: Annotated[tuple[Dataset, ...], Meta(max_length=32)] = ()
    additional_volumes: Annotated[
        tuple[Embedded, ...], Meta(max_length=64, description="Further v1 Volumes of the pods.")
    ] = ()
    additional_mounts: Annotated[
        tuple[Embedded, ...],
        Meta(max_length=64, description="Further v1 VolumeMounts of the training container."),
    ] = ()


class EnvVar(Wire, frozen=True, kw_only=True):
    """v1 EnvVar of the training container."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    value: Annotated[str, Meta(max_length=32768)] | None = None
    value_from: Embedded | None = None


class TorchrunJobSpec(Wire, frozen=True, kw_only=True):
    """What to run, where and how large."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.numNodes) != has(self.numGPUs)",
            "set exactly one of numNodes and numGPUs",
        ),
        Rule(
            "!has(self.elastic) || has(self.numNodes)",
            "elastic needs numNodes, the number of nodes to start with",
        ),
        Rule(
            "!has(self.elastic) || !has(self.numNodes)"
            " || (self.elastic.minNodes <= self.numNodes && self.numNodes <= self.elastic.maxNodes)",
            "numNodes must lie between elastic.minNodes and elastic.maxNodes",
        ),
    )

    job_queue: Annotated[
        ObjectName,
        Meta(description="TorchrunQueue of the same namespace that says how the job runs."),
    ] = ""
    num_nodes: Annotated[
        NodeCount | None,
        Meta(description="Nodes, that is pods; each takes the queue's nodeResources."),
    ] = None
    num_gpus: Annotated[
        GpuCount | None,
        Meta(description="GPUs in all; they become the fewest nodes with the same number on each."),
    ] = field(default=None, name="numGPUs")
    elastic: Elastic | None = None
    command: Annotated[
        str | tuple[str, ...],
        Meta(description="A shell line, or a list of arguments that no shell sees."),
    ] = ""
    launcher: Annotated[
        Literal["auto", "torchrun", "none"],
        Meta(
            description="auto: a plain python line runs under torchrun, everything else as it is. "
            "torchrun: always. none: never; PET_* and MASTER_* are set in each case."
        ),
    ] = "auto"
    working_dir: MountPath | None = None
    image: ImageName | None = None
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=256)] = ()
    labels: StringMap = field(default_factory=dict)
    annotations: StringMap = field(default_factory=dict)
    distributed: Distributed = Distributed()
    scheduling: JobScheduling = JobScheduling()
    volumes: Volumes = Volumes()
    pod_template: PodTemplate = PodTemplate()


class WorkersStatus(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """Workers of the present attempt, counted from their pods."""

    pending: int = 0
    ready: int = 0
    running: int = 0
    failed: int = 0
    succeeded: int = 0


class LastFailure(Wire, frozen=True, kw_only=True):
    """The first failure by time of the last gang that failed."""

    node: str = ""
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    message: str = ""
    time: datetime | None = None


class TorchrunJobStatus(Wire, frozen=True, kw_only=True):
    """How far the run is and why it waits or died. `phase` sums up the conditions."""

    phase: Phase | None = None
    conditions: tuple[Condition, ...] = ()
    observed_generation: int = 0
    reason: str = ""
    message: str = ""
    num_nodes: int | None = None
    gpus: int | None = None
    workers: WorkersStatus | None = None
    workers_status: Annotated[str, Meta(description='As "3/4 ready".')] = ""
    attempt: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    last_failure: LastFailure | None = None


class TorchrunJob(Wire, frozen=True, kw_only=True):
    """torchrun.ai/v1alpha1 TorchrunJob."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.metadata.name.size() <= {MAX_JOB_NAME}",
            f"metadata.name may have at most {MAX_JOB_NAME} characters: the names of its pods are longer",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must be a DNS-1035 label (letters, digits, '-', starting with a letter):"
            " it names a Service",
        ),
    )

    metadata: ObjectMeta = ObjectMeta()
    spec: TorchrunJobSpec = TorchrunJobSpec()
    status: TorchrunJobStatus = TorchrunJobStatus()
    invalid: Annotated[
        str, Meta(description="Why the spec could not be read; never on the wire.")
    ] = field(default="", name="__invalid__")
