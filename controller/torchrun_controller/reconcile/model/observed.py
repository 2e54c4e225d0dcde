"""The input of reconcile: one job with all its objects, as one frozen value."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from torchrun_api.kinds.core import (
    CoreEvent,
    Job,
    Node,
    PersistentVolumeClaim,
    Pod,
    SchedulingGroup,
    Service,
)
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Time, Wire
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import Kind
from torchrun_api.kinds.status import Checkpoint, Gangs, NetworkUse, Progress

T = TypeVar("T")

# The limits of the status.
ReasonString = Annotated[str, Meta(pattern="^([A-Za-z][A-Za-z0-9]{0,62})?$")]
Number = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**53)]  # the integers that are exact in every JSON reader


def decode_json(text: str, shape: type[T]) -> T | None:
    """Return the value of a termination message or an annotation, which may hold anything.

    None if the text is not JSON of this shape.
    """
    try:
        return msgspec.json.decode(text, type=shape)
    except (ValueError, RecursionError):  # deep nesting
        return None


class Installed(Struct, frozen=True, kw_only=True):
    """The kinds of gang schedulers that the API server serves, as pairs of apiVersion and plural.

    {("scheduling.volcano.sh/v1beta1", "podgroups")}, for instance. The kinds exist; whether a
    scheduler runs is not known. `topologies` are the names of KAI's Topology objects.
    """

    resources: frozenset[tuple[str, str]] = frozenset()
    topologies: tuple[str, ...] = ()

    def serves(self, kind: Kind[Any]) -> bool:
        """Whether objects of this kind and version can be created."""
        return (kind.api_version, kind.plural) in self.resources


class Conflict(Struct, frozen=True):
    """An object of another owner has a name that the job needs; `message` names the owner."""

    resource: str
    name: str
    message: str


class Rejection(Struct, frozen=True):
    """The API server refused a write of the Plan (422, or 403 by a right, admission or quota)."""

    resource: str
    name: str
    message: str
    verb: Literal["apply", "delete"] = "apply"


class Base(Struct, frozen=True, kw_only=True):
    """The workspace PVC of another job; `in_use`: a pod of that job may have it mounted."""

    claim: PersistentVolumeClaim
    in_use: bool


class Group(Struct, frozen=True):
    """The object of a gang scheduler for a gang: from the controller, or from Kueue."""

    kind: Kind[SchedulingGroup]
    object: SchedulingGroup


class ReportedFailure(Wire, frozen=True, kw_only=True):
    """The cause of a failure, as a launcher reports it."""

    rank: Number | None = None
    exit_code: Number | None = None
    signal: Number | None = None
    reason: ReasonString = ""
    message: str = ""
    time: Time | None = None


class FailedRound(ReportedFailure, frozen=True, kw_only=True):
    """A round that failed and is followed by another one, as the launcher of node 0 reports it.

    `node` is the index of the pod with the root cause, `seconds` is how long the round ran, `step`
    the newest one that it reported.
    """

    round: Gangs = 0
    node: Annotated[int, Meta(ge=0, le=10_000)] = 0
    seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    step: Count | None = None


class RestartsInPlace(Wire, frozen=True, kw_only=True):
    """The restarts of a gang in the same pods: how many, and the rounds of the last ones.

    `alone`: a Python of the gang has imported torch, but no process belongs to a group.
    `awaits_edit`: the round that failed in development mode, while the gang waits for an edit.
    `network`: what NCCL uses, as far as it is known.
    """

    count: Gangs = 0
    last: Annotated[tuple[FailedRound, ...], Meta(max_length=10)] = ()
    alone: bool = False
    awaits_edit: FailedRound | None = None
    network: Annotated[tuple[NetworkUse, ...], Meta(max_length=8)] = ()


class ProgressReport(Wire, frozen=True, kw_only=True):
    """What a launcher reports: the progress of rank 0; from node 0 restarts, or checkpoints."""

    step: Count | None = None
    total_steps: Count | None = None
    loss: float | None = None
    samples_per_second: Annotated[float, Meta(ge=0)] | None = None
    restarts_in_place: RestartsInPlace | None = None
    checkpoints: Annotated[tuple[Checkpoint, ...], Meta(max_length=3)] | None = None


class Vanished(Struct, frozen=True):
    """A worker whose pod was removed, at `time`, before its containers were seen to have ended."""

    pod: Pod
    time: datetime


class ObservedGang(Struct, frozen=True, kw_only=True):
    """The Jobs and pods of the job's attempts, in the order of their attempts.

    `child_jobs` has one Job for each attempt. If the head has its own Job, it is the Job of the
    head, and `worker_jobs` has that of the workers. `workers` are the pods of the latest attempt.
    `stale_pods` are the other pods with the name of the job whose containers may still run: those
    of earlier attempts, of a deleted Job, and of an earlier job with this name. They include pods
    that are being deleted. `vanished` are the pods that were removed by force in the last minutes.

    `groups` are those of the job and of its latest child Job, if they are readable. `progress` and
    `restarts` are the last reports that this process got from the latest child Job. `has_reported`
    is whether there was one, so that ranks of that Job have started. `checkpoints` are those that
    node 0 of any attempt reported last; with an assessment also those of the status and of
    termination messages. `former_leaders` are the pods of node 0 of earlier attempts that have
    ended.
    """

    child_jobs: tuple[Job, ...] = ()
    worker_jobs: tuple[Job, ...] = ()
    workers: tuple[Pod, ...] = ()
    stale_pods: tuple[Pod, ...] = ()
    vanished: tuple[Vanished, ...] = ()
    groups: tuple[Group, ...] = ()
    service: Service | None = None
    progress: Progress | None = None
    restarts: RestartsInPlace = RestartsInPlace()
    has_reported: bool = False
    checkpoints: tuple[Checkpoint, ...] = ()
    former_leaders: tuple[Pod, ...] = ()

    @property
    def current_job(self) -> Job:
        """The latest child Job. Raises IndexError where there is none."""
        return self.child_jobs[-1]

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The pods of the latest gang and of the others."""
        return (*self.workers, *self.stale_pods)


class ObservedWorkspace(Struct, frozen=True, kw_only=True):
    """The PVCs of a job, and its sync and setup pods in the order of their numbers.

    A retained PVC has no owner; its label identifies it. `base` is the workspace that an annotation
    of the job names, if it exists.
    """

    claims: tuple[PersistentVolumeClaim, ...] = ()
    sync_pods: tuple[Pod, ...] = ()
    setup_pods: tuple[Pod, ...] = ()
    base: Base | None = None

    @property
    def latest_sync_pod(self) -> Pod | None:
        """The sync pod with the highest number; None where there is none."""
        return self.sync_pods[-1] if self.sync_pods else None


class ObservedCluster(Struct, frozen=True, kw_only=True):
    """Nodes, installed schedulers and warning events.

    `nodes` has the machines of the job's pods, of unfenced workers and of earlier failures, if they
    exist; all machines if checkpoints stay on machines; None while they are unknown.
    `nodes_awaited`: they are unknown although the controller may read them. `promised` has the
    bytes on each machine that checkpoints of workers there may take. `installed` is None until the
    API server has answered. `warnings` are events on the PVCs, the latest child Job and the pods of
    that Job, in the order of time.
    """

    nodes: dict[str, Node] | None = None
    nodes_awaited: bool = False
    promised: dict[str, int] = field(default_factory=dict)
    installed: Installed | None = None
    warnings: tuple[CoreEvent, ...] = ()


class RefusedWrites(Struct, frozen=True, kw_only=True):
    """Names of other owners, from the cache or the last apply, and refused writes.

    A refused write stays here until the controller retries it.
    """

    conflicts: tuple[Conflict, ...] = ()
    rejections: tuple[Rejection, ...] = ()


class Observed(Struct, frozen=True, kw_only=True):
    """The present state of one job. Lists hold only objects that the job's UID controls.

    `parents` are the jobs that it depends on, by name and as far as they exist. `waits_for` are
    names of jobs that it waits for, see `dependencies.follow`. `dependents` are the jobs that name
    this one in `spec.dependsOn`.
    """

    job: TorchrunJob
    queue: TorchrunQueue | None = None
    parents: dict[str, TorchrunJob] = field(default_factory=dict)
    waits_for: tuple[str, ...] = ()
    dependents: tuple[TorchrunJob, ...] = ()
    gang: ObservedGang = ObservedGang()
    workspace: ObservedWorkspace = ObservedWorkspace()
    cluster: ObservedCluster = ObservedCluster()
    refused: RefusedWrites = RefusedWrites()


class Defaults(Struct, frozen=True, kw_only=True):
    """Settings of the controller that apply to every job or queue."""

    runtime_image: str
    runtime_image_pull_policy: str = "IfNotPresent"
    etcd_endpoint: str = ""  # host:port for jobs with rdzvBackend etcd that name none; "": none
    kai_quota_namespaces: tuple[str, ...] = ()  # their queues set quota and parent of KAI queues
    progress_url: str = ""  # where workers report their progress; empty: they do not
    docs_url: str = ""  # the site of the documentation; empty: messages have no links
