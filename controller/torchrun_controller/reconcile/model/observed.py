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


class Observed(Struct, frozen=True, kw_only=True):
    """The present state of one job. Lists hold only objects that the job's UID controls.

    `sync_pods` and `setup_pods` are in the order of their numbers, `child_jobs` of their attempts.
    Where the head has pods of its own, its Job is among these, and that of its workers in
    `worker_jobs`. `workers` are the pods of the latest gang, `ghosts` those of any other gang under
    the job's name that may still run, an earlier job's of that name and collected ones included. A
    retained claim has no owner and is listed by its label. `conflicts` are the names held by
    others, as the cache or the last apply showed; `rejections` are all writes that the API server
    refused and that are not tried again yet. `warnings` regard its claims, its latest child
    Job and that Job's pods, in the order of time. `progress` is what a worker of the latest child
    Job has told this process last. `nodes` holds those of its pods, of unfenced workers and of
    earlier failures, as far as they exist; it is None where nothing is known of nodes, as none may
    be read. `base` is what the job's annotation names, if that is there. `installed` is None until
    the API server has told. `parents` are the jobs that it depends on, and those that these depend
    on, and so on, by name and as far as they exist. Where its checkpoints stay on its nodes,
    `nodes` holds every node, and `promised` the bytes on each that were promised to the checkpoints
    of workers there.
    `groups` are those of the job and of its latest child Job, as far as they may be read.
    """

    job: TorchrunJob
    queue: TorchrunQueue | None = None
    claims: tuple[PersistentVolumeClaim, ...] = ()
    service: Service | None = None
    sync_pods: tuple[Pod, ...] = ()
    probes: tuple[Pod, ...] = ()
    setup_pods: tuple[Pod, ...] = ()
    child_jobs: tuple[Job, ...] = ()
    worker_jobs: tuple[Job, ...] = ()
    workers: tuple[Pod, ...] = ()
    stale_pods: tuple[Pod, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    warnings: tuple[CoreEvent, ...] = ()
    progress: Progress | None = None
    nodes: dict[str, Node] | None = None
    base: Base | None = None
    installed: Installed | None = None
    promised: dict[str, int] = field(default_factory=dict)
    parents: dict[str, TorchrunJob] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()


class Defaults(Struct, frozen=True, kw_only=True):
    """What the controller's settings lend to every job."""

    runtime_image: str
    runtime_image_pull_policy: str = "IfNotPresent"
    grow_after: timedelta = timedelta(minutes=5)  # age of a gang before a larger one follows
    progress_url: str = ""  # where workers report their progress; empty: they do not
