"""What reconcile may look at: one job with everything of its own, as one frozen value."""

from datetime import timedelta
from typing import Literal

from msgspec import Struct, field

from torchrun_api.core import (
    CoreEvent,
    Job,
    Node,
    PersistentVolumeClaim,
    Pod,
    SchedulingGroup,
    Service,
)
from torchrun_api.job import TorchrunJob
from torchrun_api.kinds import Kind
from torchrun_api.queue import TorchrunQueue
from torchrun_api.status import Progress
from torchrun_controller.reconcile.model.installed import Installed


class Conflict(Struct, frozen=True):
    """A name of ours is held by an object that is not ours; `message` says by whose."""

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
    """Another job's workspace claim; `in_use`: a pod of that job may have it mounted."""

    claim: PersistentVolumeClaim
    in_use: bool


class Group(Struct, frozen=True):
    """A gang as a gang scheduler knows it: made by the controller, or by Kueue for a child Job."""

    kind: Kind[SchedulingGroup]
    object: SchedulingGroup


class ObservedGang(Struct, frozen=True, kw_only=True):
    """The Jobs and pods of the job's attempts, in the order of their attempts.

    Where the head has pods of its own, its Job is among `child_jobs`, and that of its workers in
    `worker_jobs`. `workers` are the pods of the latest gang. `stale_pods` are those of any other
    gang under the job's name that may still run, an earlier job's of that name and collected ones
    included. `groups` are those of the job and of its latest child Job, as far as they may be read.
    `progress` is what a worker of the latest child Job reported to this process last.
    """

    child_jobs: tuple[Job, ...] = ()
    worker_jobs: tuple[Job, ...] = ()
    workers: tuple[Pod, ...] = ()
    stale_pods: tuple[Pod, ...] = ()
    probes: tuple[Pod, ...] = ()
    groups: tuple[Group, ...] = ()
    service: Service | None = None
    progress: Progress | None = None

    @property
    def current_job(self) -> Job:
        """The latest child Job. Raises IndexError where there is none."""
        return self.child_jobs[-1]


class ObservedWorkspace(Struct, frozen=True, kw_only=True):
    """The claims of a job, and the pods that prepare its workspace, in the order of their numbers.

    A retained claim has no owner and is found by its label. `base` is the workspace that the job's
    annotation names, if that exists.
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
    """What is not the job's own: nodes, schedulers that are installed, and warnings.

    `nodes` holds those of the job's pods, of unfenced workers and of earlier failures, as far as
    they exist; every node where checkpoints stay on nodes; None where no node may be read.
    `promised` are then the bytes on each node that checkpoints of workers there may take.
    `installed` is None until the API server has answered. `warnings` are events regarding the
    claims, the latest child Job and that Job's pods, in the order of time.
    """

    nodes: dict[str, Node] | None = None
    promised: dict[str, int] = field(default_factory=dict)
    installed: Installed | None = None
    warnings: tuple[CoreEvent, ...] = ()


class RefusedWrites(Struct, frozen=True, kw_only=True):
    """Names held by others, as the cache or the last apply showed, and writes that were refused.

    A refused write stands here until it is to be tried again.
    """

    conflicts: tuple[Conflict, ...] = ()
    rejections: tuple[Rejection, ...] = ()


class Observed(Struct, frozen=True, kw_only=True):
    """The present state of one job. Lists hold only objects that the job's UID controls.

    `parents` are the jobs that it depends on, and those that these depend on, and so on, by name
    and as far as they exist. `dependents` are the jobs that name this one in `spec.dependsOn`.
    """

    job: TorchrunJob
    queue: TorchrunQueue | None = None
    parents: dict[str, TorchrunJob] = field(default_factory=dict)
    dependents: tuple[TorchrunJob, ...] = ()
    gang: ObservedGang = ObservedGang()
    workspace: ObservedWorkspace = ObservedWorkspace()
    cluster: ObservedCluster = ObservedCluster()
    refused: RefusedWrites = RefusedWrites()


class Defaults(Struct, frozen=True, kw_only=True):
    """What the controller's settings lend to every job."""

    runtime_image: str
    runtime_image_pull_policy: str = "IfNotPresent"
    grow_after: timedelta = timedelta(minutes=5)  # age of a gang before a larger one follows
    progress_url: str = ""  # where workers report their progress; empty: they do not
