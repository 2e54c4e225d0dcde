"""TorchrunJob: one training run."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.admission import Dependency, JobPriority, Topology
from torchrun_api.meta import ObjectMeta, Wire
from torchrun_api.names import MAX_JOB_NAME
from torchrun_api.reliability import Reliability
from torchrun_api.schema import BY_NAME, Embedded, Quantity, Rule
from torchrun_api.shared import (
    Affinity,
    CheckpointsOverride,
    Dataset,
    Distributed,
    GpuCount,
    ImageName,
    LabelMap,
    MountPath,
    NodeCount,
    NodeSelector,
    ObjectName,
    PodTemplate,
    PriorityClassName,
    StringMap,
    Tolerations,
)
from torchrun_api.status import TorchrunJobStatus
from torchrun_api.workspace import WorkspaceVolume


class Elastic(Wire, frozen=True, kw_only=True):
    """The sizes between which the job may move; numNodes is the one that is wanted.

    kubectl scale changes numNodes within these bounds. Where workers find no node for 30 s, a gang
    of those that have one goes on, minNodes at least; when there is room again, by the scheduler's
    word, it grows to numNodes, at most every 5 minutes (the controller's --grow-after). Each resize
    is a new gang that starts from the checkpoint, and counts as no restart.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minNodes <= self.maxNodes",
            "elastic.minNodes must not be larger than elastic.maxNodes",
        ),
    )

    min_nodes: Annotated[NodeCount, Meta(description="Fewest nodes that the job goes on with.")]
    max_nodes: Annotated[NodeCount, Meta(description="Most nodes that numNodes may ask for.")]


class JobScheduling(Wire, frozen=True, kw_only=True):
    """The job's overrides of its queue's scheduling."""

    priority_class_name: PriorityClassName | None = None
    node_selector: NodeSelector = field(default_factory=dict)
    tolerations: Tolerations = ()
    affinity: Affinity | None = None
    topology: Topology | None = None


class JobNodeResources(Wire, frozen=True, kw_only=True):
    """What the job takes of each of its nodes, at most what the queue's nodeResources give.

    Of fewer GPUs than the queue's nodes have it takes CPU and memory pro rata, where they are not
    said here.
    """

    gpus: (
        Annotated[int, Meta(ge=0, le=1024, description="GPUs on each node. Default: the queue's.")]
        | None
    ) = None
    cpus: Annotated[Quantity, Meta(description='CPUs on each node, as 8 or "500m".')] | None = None
    memory: Annotated[Quantity, Meta(description='Memory on each node, as "64Gi".')] | None = None


class Head(Wire, frozen=True, kw_only=True):
    """Pods of its own for node 0, beside which all others are workers: Ray's head, for one.

    It runs the same command with TORCHRUN_ROLE=head, the others with TORCHRUN_ROLE=worker. When it
    succeeds the job has, and workers that have not ended a grace period later are ended.
    """

    node_resources: Annotated[
        JobNodeResources,
        Meta(description="As spec.nodeResources, for the head: what is not said is the queue's."),
    ] = JobNodeResources()
    pod_template: Annotated[
        PodTemplate, Meta(description="Merged over spec.podTemplate, for the head.")
    ] = PodTemplate()


class Volumes(Wire, frozen=True, kw_only=True):
    """Storage overrides and additions."""

    workspace: WorkspaceVolume | None = None
    checkpoints: CheckpointsOverride | None = None
    datasets: Annotated[
        tuple[Dataset, ...],
        Meta(
            max_length=32,
            description="Claims that exist already, beside those of the queue.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    additional_volumes: Annotated[
        tuple[Embedded, ...], Meta(max_length=64, description="Further v1 Volumes of the pods.")
    ] = ()
    additional_mounts: Annotated[
        tuple[Embedded, ...],
        Meta(max_length=64, description="Further v1 VolumeMounts of the training container."),
    ] = ()


class EnvVar(Wire, frozen=True, kw_only=True):
    """v1 EnvVar of the training container."""

    name: Annotated[str, Meta(min_length=1, max_length=253, description="Name of the variable.")]
    value: Annotated[str, Meta(max_length=32768, description="Its value.")] | None = None
    value_from: (
        Annotated[Embedded, Meta(description="v1 EnvVarSource: where its value is read from.")]
        | None
    ) = None


class TorchrunJobSpec(Wire, frozen=True, kw_only=True):
    """What to run, where and how large."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("jobQueue", "command")
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
            "!has(self.elastic) || !has(self.numNodes) || (self.elastic.minNodes <= self.numNodes"
            " && self.numNodes <= self.elastic.maxNodes)",
            "numNodes must lie between elastic.minNodes and elastic.maxNodes",
        ),
        Rule(
            "!has(self.elastic) || !has(self.distributed) || !has(self.distributed.rdzvBackend)"
            " || self.distributed.rdzvBackend != 'static'",
            "elastic contradicts distributed.rdzvBackend static, which knows one size only:"
            " use c10d, its default",
        ),
        Rule(
            "!has(self.head) || (has(self.numNodes) && self.numNodes >= 2)",
            "head needs numNodes of 2 or more: the head and its workers",
        ),
        Rule(
            "!has(self.head) || !has(self.elastic)",
            "head contradicts elastic: a gang with a head has one size",
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
    node_resources: JobNodeResources = JobNodeResources()
    elastic: Elastic | None = None
    head: Head | None = None
    command: Annotated[
        Annotated[str, Meta(min_length=1, max_length=65536)]
        | Annotated[
            tuple[Annotated[str, Meta(max_length=65536)], ...], Meta(min_length=1, max_length=1024)
        ],
        Meta(
            description="What each node runs: a string is a shell line, "
            "a list of strings is a program and its arguments, that no shell sees. "
            "It cannot change once the job has started."
        ),
    ] = ""
    setup_command: Annotated[
        Annotated[str, Meta(max_length=65536)]
        | Annotated[tuple[Annotated[str, Meta(max_length=65536)], ...], Meta(max_length=1024)],
        Meta(
            description="Run once before the command, in the same image and directory: a shell "
            "line or a list of strings. What it installs with pip, or writes to "
            "$TORCHRUN_ENV_DIR, is there for every worker; all else that it changes is dropped. "
            "It runs again when the workspace, the image, requirements or this line change."
        ),
    ] = ""
    requirements: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...],
        Meta(
            max_length=256,
            description="Installed before setupCommand runs, each as pip install takes it: "
            '"einops>=0.8", "-r requirements.txt" (a file of the workspace), "./libs/mine". '
            "What the image has already, as torch, is not installed again.",
        ),
    ] = ()
    launcher: Annotated[
        Literal["auto", "torchrun", "none"],
        Meta(
            description="auto: a plain python line runs under torchrun, everything else as it is. "
            "torchrun: always. none: never; PET_* and MASTER_* are set in each case."
        ),
    ] = "auto"
    working_dir: Annotated[
        MountPath | None,
        Meta(description="Working directory of the command. Default: the queue's."),
    ] = None
    image: Annotated[
        ImageName | None,
        Meta(description="Image of the training container. Default: the queue's."),
    ] = None
    env: Annotated[
        tuple[EnvVar, ...],
        Meta(
            max_length=256,
            description="Environment of the training container.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    labels: Annotated[LabelMap, Meta(description="Further labels of the pods.")] = field(
        default_factory=dict
    )
    annotations: Annotated[StringMap, Meta(description="Further annotations of the pods.")] = field(
        default_factory=dict
    )
    distributed: Distributed = Distributed()
    scheduling: JobScheduling = JobScheduling()
    volumes: Volumes = Volumes()
    reliability: Reliability = Reliability()
    development: Annotated[
        bool,
        Meta(
            description="Edits are expected: a sync pod is kept ready for them, and pods whose "
            "command fails are kept for the next edit, for an hour. kubectl torchrun sync --watch "
            "sets it."
        ),
    ] = False
    suspend: Annotated[
        bool,
        Meta(
            description="Pause: ranks get SIGTERM and the grace period, then everything but the "
            "claims is freed. Back to false: a new gang goes on, not counted as a restart."
        ),
    ] = False
    priority: Annotated[
        JobPriority | None,
        Meta(
            description="Order among the jobs of the queue: higher first, then older. A waiting "
            "job may preempt running ones of a lower priority. At most limits.maxPriority of the "
            "queue. Default: the queue's."
        ),
    ] = None
    depends_on: Annotated[
        tuple[Dependency, ...],
        Meta(
            max_length=64,
            description="Jobs that must have come so far before this one starts.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    pod_template: PodTemplate = PodTemplate()


def has_started(job: str) -> str:
    """CEL: whether this job has had a gang (status.workers stays), or is admitted for one.

    The phase is no answer: an object that the API server refuses sets a job back to Pending.
    Status is written by the controller alone.
    """
    admission = f"{job}.status.admission"
    admitted = f"has({admission}) && has({admission}.nodes) && {admission}.nodes > 0"
    return f"(has({job}.status) && (has({job}.status.workers) || ({admitted})))"


_WAITS = f"!{has_started('oldSelf')}"
_PHASE = "oldSelf.?status.?phase.orValue('Pending')"
# A workspace is prepared before the job has workers: its source is fixed from then on, and what
# the source refers to once the workspace is ready.
_UNPREPARED = f"({_WAITS} && {_PHASE} == 'Pending')"
_SYNCS = f"({_WAITS} && {_PHASE} in ['Pending', 'Syncing'])"


def _source(job: str) -> str:
    # has() all the way: the server's cost estimate knows no bounds behind optional selection.
    workspace = f"{job}.spec.volumes.workspace"
    exists = f"has({job}.spec.volumes) && has({workspace}) && {workspace}.enabled"
    return f"({exists} ? {workspace}.source : 'none')"


def _code(job: str, field: str) -> str:
    workspace = f"{job}.spec.volumes.workspace"
    exists = f"has({job}.spec.volumes) && has({workspace}) && has({workspace}.{field})"
    value = f"{workspace}.{field}" + (".name" if field == "secretRef" else "")
    return f"({exists} ? {value} : '')"


_CODE = ("url", "ref", "subPath", "secretRef", "claimName", "image")


_FIXED = "cannot change once the job has started: submit a new job"


class TorchrunJob(Wire, frozen=True, kw_only=True):
    """A TorchrunJob is one training run: a command on a number of nodes, as its queue lays down."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("spec",)
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.metadata.name.size() <= {MAX_JOB_NAME}",
            f"metadata.name may have at most {MAX_JOB_NAME} characters:"
            " the names of its pods are longer",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must be a DNS-1035 label (letters, digits, '-', starting with a letter):"
            " it names a Service",
        ),
        Rule(
            f"{_WAITS} || self.spec.jobQueue == oldSelf.spec.jobQueue",
            _FIXED,
            field=".spec.jobQueue",
        ),
        Rule(
            f"{_WAITS} || self.spec.?numGPUs == oldSelf.spec.?numGPUs",
            _FIXED,
            field=".spec.numGPUs",
        ),
        Rule(
            f"{_WAITS} || has(self.spec.elastic) || self.spec.?numNodes == oldSelf.spec.?numNodes",
            f"{_FIXED} (only spec.elastic allows another size)",
            field=".spec.numNodes",
        ),
        Rule(
            f"{_WAITS} || has(self.spec.elastic) == has(oldSelf.spec.elastic)",
            "cannot be added or removed once the job has started: submit a new job",
            field=".spec.elastic",
        ),
        Rule(
            f"{_UNPREPARED} || {_source('self')} == {_source('oldSelf')}",
            f"enabled and source {_FIXED}",
            field=".spec.volumes.workspace",
        ),
        *(
            Rule(
                f"{_SYNCS} || {_code('self', name)} == {_code('oldSelf', name)}",
                f"{name} cannot change once workers were made: submit a new job",
                field=".spec.volumes.workspace",
            )
            for name in _CODE
        ),
    )

    metadata: ObjectMeta = ObjectMeta()
    spec: TorchrunJobSpec = TorchrunJobSpec()
    status: TorchrunJobStatus = TorchrunJobStatus()
    invalid: Annotated[
        str, Meta(description="Why the spec could not be read; never on the wire.")
    ] = field(default="", name="__invalid__")
