"""A gang scheduler: what it is told of a gang, and what it wants of the gang's objects."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from torchrun_api import names
from torchrun_api.admission import GangScheduling, Topology
from torchrun_api.core import SchedulingGroup
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject
from torchrun_api.kinds import Kind
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.base import metadata

_JOB_NAME = "batch.kubernetes.io/job-name"


class Gang(Struct, frozen=True, kw_only=True):
    """One attempt. `name` is that of its child Job, `template` the pods' v1 PodTemplateSpec.

    `parts` says of how many pods of which template it consists, of `least` in all; there are two
    where it has a head. Fewer than `least` pods are of no use: all of them, or minNodes of an
    elastic job, which goes on with as many as have found a node.
    """

    job: TorchrunJob
    queue: TorchrunQueue
    name: str
    attempt: int
    nodes: int
    least: int
    template: JsonObject
    parts: tuple[tuple[JsonObject, int], ...]
    topology: Topology | None
    installed: Installed

    @property
    def priority_class_name(self) -> str:
        """Of the pods; "" if they have none."""
        spec = self.template.get("spec")
        value = spec.get("priorityClassName") if isinstance(spec, dict) else None
        return value if isinstance(value, str) else ""

    @property
    def labels(self) -> JsonObject:
        """By which its pods are known, and no other attempt's."""
        if len(self.parts) == 1:
            return {_JOB_NAME: self.name}  # the Job controller's own
        attempt = str(self.attempt)
        return {names.JOB_LABEL: self.job.metadata.name, names.ATTEMPT_LABEL: attempt}

    def metadata(self) -> JsonObject:
        """`metadata` of the group: named like the child Job, owned by the TorchrunJob.

        The group is made before the child Job, so it cannot be owned by that.
        """
        meta = metadata(self.job, self.name, names.GANG)
        labels = meta["labels"]
        assert isinstance(labels, dict)
        return {**meta, "labels": {**labels, names.ATTEMPT_LABEL: str(self.attempt)}}


class GangObjects(Struct, frozen=True, kw_only=True):
    """What is made before the child Job, and what is laid on top of it and its pods.

    `job` and `template` are merged into the child Job and its pod template as Kubernetes' strategic
    merge does it. `probe` goes onto pods that only ask whether there is room for one more worker.
    """

    groups: tuple[Apply, ...] = ()
    job: JsonObject = field(default_factory=dict)
    template: JsonObject = field(default_factory=dict)
    probe: JsonObject = field(default_factory=dict)


class GangScheduler(Struct, frozen=True, kw_only=True):
    """One way to have all workers of a gang started together: all that differs stands here.

    `pod_scheduler` is the name under which it is usually installed, "" where pods need none. One of
    `kinds` must be served; else `install_hint` says what to do. `build` makes the objects of a gang
    and may raise InvalidSpecError. `refusals` are conditions, with their status, by which its
    groups say that a gang is not placed or not admitted.
    """

    name: GangScheduling
    build: Callable[[Gang], GangObjects]
    pod_scheduler: str = ""
    kinds: tuple[Kind[SchedulingGroup], ...] = ()
    install_hint: str = ""
    refusals: tuple[tuple[str, str], ...] = ()
    # False: the scheduler creates the groups of its gangs itself, and the controller reads them.
    creates_groups: bool = True
    # Kinds that the controller reads or writes besides groups, where they are served.
    other_kinds: tuple[Kind[Any], ...] = ()
