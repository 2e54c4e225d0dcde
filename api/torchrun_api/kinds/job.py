"""TorchrunJob: one training run."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from torchrun_api.kinds.admission import Dependency, JobPriority, Topology
from torchrun_api.kinds.meta import ObjectMeta, Wire
from torchrun_api.kinds.reliability import Reliability
from torchrun_api.kinds.schema import BY_NAME, Embedded, Quantity, Rule
from torchrun_api.kinds.shared import (
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
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_api.kinds.workspace import WorkspaceVolume
from torchrun_api.names import MAX_JOB_NAME


class Elastic(Wire, frozen=True, kw_only=True):
    """The range of sizes of the job. numNodes is the size that you want.

    kubectl scale changes numNodes within this range. If pods find no machine for 30 s, a smaller
    gang of at least minNodes continues. A resumed job asks for numNodes again, and so does a new
    gang an hour or more after the job shrank. Each resize starts a new gang from the checkpoint and
    does not count as a restart.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minNodes <= self.maxNodes",
            "elastic.minNodes must be less than or equal to elastic.maxNodes",
        ),
    )

    min_nodes: Annotated[
        NodeCount, Meta(description="Minimum number of nodes with which the job continues.")
    ]
    max_nodes: Annotated[NodeCount, Meta(description="Maximum value of numNodes.")]


class JobScheduling(Wire, frozen=True, kw_only=True):
    """Scheduling settings that override the queue's."""

    priority_class_name: PriorityClassName | None = None
    node_selector: NodeSelector = field(default_factory=dict)
    tolerations: Tolerations = ()
    affinity: Affinity | None = None
    topology: Topology | None = None


class JobNodeResources(Wire, frozen=True, kw_only=True):
    """Resources of each node, at most the queue's nodeResources.

    A job that sets fewer GPUs than the queue gets a proportional share of CPU and memory, unless it
    sets them too.
    """

    gpus: (
        Annotated[int, Meta(ge=0, le=1024, description="GPUs of each node. Default: the queue's.")]
        | None
    ) = None
    cpus: (
        Annotated[Quantity, Meta(description='CPUs of each node, for example 8 or "500m".')] | None
    ) = None
    memory: (
        Annotated[Quantity, Meta(description='Memory of each node, for example "64Gi".')] | None
    ) = None


class Head(Wire, frozen=True, kw_only=True):
    """Settings of node 0 if it differs from the others, for example the head of Ray.

    The head runs the same command with TORCHRUN_ROLE=head, all others run it with
    TORCHRUN_ROLE=worker. The job succeeds when the head succeeds. Pods that have not exited a grace
    period later are deleted.
    """

    node_resources: Annotated[
        JobNodeResources,
        Meta(
            description="Resources of the head, like spec.nodeResources. Default: the queue's "
            "nodeResources."
        ),
    ] = JobNodeResources()
    pod_template: Annotated[
        PodTemplate, Meta(description="Merged into the pod of the head, after spec.podTemplate.")
    ] = PodTemplate()


class Volumes(Wire, frozen=True, kw_only=True):
    """Storage settings that override or extend the queue's."""

    workspace: WorkspaceVolume | None = None
    checkpoints: CheckpointsOverride | None = None
    datasets: Annotated[
        tuple[Dataset, ...],
        Meta(
            max_length=32,
            description="Existing PVCs, in addition to those of the queue.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    additional_volumes: Annotated[
        tuple[Embedded, ...], Meta(max_length=64, description="Additional v1 Volumes of the pods.")
    ] = ()
    additional_mounts: Annotated[
        tuple[Embedded, ...],
        Meta(max_length=64, description="Additional v1 VolumeMounts of the training container."),
    ] = ()


class EnvVar(Wire, frozen=True, kw_only=True):
    """v1 EnvVar of the training container."""

    name: Annotated[str, Meta(min_length=1, max_length=253, description="Name of the variable.")]
    value: Annotated[str, Meta(max_length=32768, description="Value of the variable.")] | None = (
        None
    )
    value_from: (
        Annotated[Embedded, Meta(description="v1 EnvVarSource: source of the value.")] | None
    ) = None


class TorchrunJobSpec(Wire, frozen=True, kw_only=True):
    """What the job runs, where, and at what size."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("jobQueue", "command")
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.numNodes) != has(self.numGPUs)",
            "set exactly one of numNodes and numGPUs",
        ),
        Rule(
            "!has(self.elastic) || has(self.numNodes)",
            "numNodes is required with elastic: it is the initial number of nodes",
        ),
        Rule(
            "!has(self.elastic) || !has(self.numNodes) || (self.elastic.minNodes <= self.numNodes"
            " && self.numNodes <= self.elastic.maxNodes)",
            "numNodes must be between elastic.minNodes and elastic.maxNodes",
        ),
        Rule(
            "!has(self.elastic) || !has(self.distributed) || !has(self.distributed.rdzvBackend)"
            " || self.distributed.rdzvBackend != 'static'",
            "distributed.rdzvBackend must not be static with elastic: set it to c10d, the default",
        ),
        Rule(
            "!has(self.head) || (has(self.numNodes) && self.numNodes >= 2)",
            "numNodes must be at least 2 with head: the head and its workers",
        ),
        Rule(
            "!has(self.head) || !has(self.elastic)",
            "head and elastic are mutually exclusive: a gang with a head has a fixed size",
        ),
    )

    job_queue: Annotated[
        ObjectName,
        Meta(
            description="TorchrunQueue in the same namespace that provides the defaults and the"
            " quota of the job."
        ),
    ] = ""
    num_nodes: Annotated[
        NodeCount | None,
        Meta(description="Number of nodes. Each node is one pod with the queue's nodeResources."),
    ] = None
    num_gpus: Annotated[
        GpuCount | None,
        Meta(
            description="Total number of GPUs. The job runs on the smallest number of nodes "
            "that divides them evenly."
        ),
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
            description="Command that runs on each node. A string is a shell command line. A "
            "list of strings is a program and its arguments, which run without a "
            "shell. Immutable once the job has started."
        ),
    ] = ""
    setup_command: Annotated[
        Annotated[str, Meta(max_length=65536)]
        | Annotated[tuple[Annotated[str, Meta(max_length=65536)], ...], Meta(max_length=1024)],
        Meta(
            description="Command that runs once before the job, in the same image and "
            "directory: a shell command line or a list of strings. All pods see "
            "what it installs with pip or writes to $TORCHRUN_ENV_DIR; all other "
            "changes are discarded. It runs again when the workspace, the image, "
            "requirements or this command change."
        ),
    ] = ""
    requirements: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...],
        Meta(
            max_length=256,
            description="Requirements that pip installs before setupCommand runs: "
            '"einops>=0.8", "-r requirements.txt" (a file in the workspace), '
            '"./libs/mine". Packages that the image already has, such as torch, are'
            " not installed again.",
        ),
    ] = ()
    launcher: Annotated[
        Literal["auto", "torchrun", "none"],
        Meta(
            description="auto: a python command runs under torchrun, also within a shell line "
            "such as `cd src && python train.py | tee log`; any other command runs as it is. "
            "torchrun: the command always runs under torchrun. none: it never does. PET_* and "
            "MASTER_* are set in all cases."
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
    labels: Annotated[LabelMap, Meta(description="Additional labels of the pods.")] = field(
        default_factory=dict
    )
    annotations: Annotated[StringMap, Meta(description="Additional annotations of the pods.")] = (
        field(default_factory=dict)
    )
    distributed: Distributed = Distributed()
    scheduling: JobScheduling = JobScheduling()
    volumes: Volumes = Volumes()
    reliability: Reliability = Reliability()
    development: Annotated[
        bool,
        Meta(
            description="Keeps a sync pod ready for edits of the workspace. Pods whose command "
            "fails wait up to an hour for the next edit. kubectl torchrun sync "
            "--watch sets this field."
        ),
    ] = False
    suspend: Annotated[
        bool,
        Meta(
            description="Pauses the job. The ranks get SIGTERM and the grace period, then all "
            "resources except PVCs are released. When the field is false again, a "
            "new gang continues. It does not count as a restart."
        ),
    ] = False
    priority: Annotated[
        JobPriority | None,
        Meta(
            description="Order of the jobs in the queue: higher priority first, then older "
            "jobs. A waiting job may preempt running jobs of a lower priority. At "
            "most the queue's limits.maxPriority. Default: the queue's priority."
        ),
    ] = None
    depends_on: Annotated[
        tuple[Dependency, ...],
        Meta(
            max_length=64,
            description="Jobs that must reach a state before this one starts.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    pod_template: PodTemplate = PodTemplate()


def has_started(job: str) -> str:
    """CEL: whether this job has had a gang (status.workers stays), or is admitted for one.

    The phase does not show it: an object that the API server rejects sets a job back to Pending.
    Only the controller writes the status.
    """
    admission = f"{job}.status.admission"
    admitted = f"has({admission}) && has({admission}.nodes) && {admission}.nodes > 0"
    return f"(has({job}.status) && (has({job}.status.workers) || ({admitted})))"


_WAITS = f"!{has_started('oldSelf')}"
_PHASE = "oldSelf.?status.?phase.orValue('Pending')"
# A job may be suspended before its workspace is ready, for example to correct a wrong URL. The
# commit is recorded once a fetched workspace is ready.
_UNSYNCED = f"{_PHASE} == 'Suspended' && oldSelf.?status.?workspaceCommit.orValue('') == ''"
# A workspace is prepared before the job has workers. From then on its source is immutable; the
# details of the source are immutable once the workspace is ready.
_UNPREPARED = f"({_WAITS} && ({_PHASE} == 'Pending' || ({_UNSYNCED})))"
_SYNCS = f"({_WAITS} && ({_PHASE} in ['Pending', 'Syncing'] || ({_UNSYNCED})))"


def _source(job: str) -> str:
    # has() at each level: the server's cost estimate has no bounds after optional selection.
    workspace = f"{job}.spec.volumes.workspace"
    exists = f"has({job}.spec.volumes) && has({workspace}) && {workspace}.enabled"
    return f"({exists} ? {workspace}.source : 'none')"


def _code(job: str, field: str) -> str:
    workspace = f"{job}.spec.volumes.workspace"
    exists = f"has({job}.spec.volumes) && has({workspace}) && has({workspace}.{field})"
    value = f"{workspace}.{field}" + (".name" if field == "secretRef" else "")
    return f"({exists} ? {value} : '')"


_CODE = ("url", "ref", "subPath", "secretRef", "claimName", "image")


_FIXED = "field is immutable once the job has started: submit a new job"


class TorchrunJob(Wire, frozen=True, kw_only=True):
    """A TorchrunJob is one training run: a command on a number of nodes of a queue."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("spec",)
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.metadata.name.size() <= {MAX_JOB_NAME}",
            f"metadata.name must be no more than {MAX_JOB_NAME} characters, because the names of"
            " the pods are longer",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must be a DNS-1035 label (lowercase letters, digits and '-', starting"
            " with a letter), because a Service has this name",
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
            f"{_FIXED} (only spec.elastic allows resizing)",
            field=".spec.numNodes",
        ),
        Rule(
            f"{_WAITS} || has(self.spec.elastic) == has(oldSelf.spec.elastic)",
            "cannot be added or removed once the job has started: submit a new job",
            field=".spec.elastic",
        ),
        Rule(
            f"{_UNPREPARED} || {_source('self')} == {_source('oldSelf')}",
            "enabled and source are immutable once the job is past Pending: submit a new job",
            field=".spec.volumes.workspace",
        ),
        *(
            Rule(
                f"{_SYNCS} || {_code('self', name)} == {_code('oldSelf', name)}",
                f"{name} is immutable once the job is past Syncing: submit a new job",
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
    incomplete: Annotated[
        bool, Meta(description="Whether the status could not be read either; never on the wire.")
    ] = field(default=False, name="__incomplete__")
