"""The interface of gang schedulers: a gang as input, objects and patches as output.

For schedulers without topology of their own, topology is pod affinity.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.kinds.admission import Topology
from torchrun_api.kinds.core import SchedulingGroup
from torchrun_api.kinds.gang_schedulers import GangSchedulerApi
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import Kind
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.base import metadata

_JOB_NAME = "batch.kubernetes.io/job-name"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


class ScheduledGang(Struct, frozen=True, kw_only=True):
    """One attempt. `name` is the name of its child Job, `template` the v1 PodTemplateSpec.

    `least` is the number of pods that must be scheduled together: all pods, or minNodes of an
    elastic job. `parts` are the templates of these pods with their numbers; a gang with a head has
    two. `kai_quota`: the namespace may give its KAI queues a quota.
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
    kai_quota: bool = False

    @property
    def priority_class_name(self) -> str:
        """The priority class of the pods, "" for none."""
        spec = self.template.get("spec")
        value = spec.get("priorityClassName") if isinstance(spec, dict) else None
        return value if isinstance(value, str) else ""

    @property
    def labels(self) -> JsonObject:
        """Labels that select the pods of this attempt and no others."""
        if len(self.parts) == 1:
            return {_JOB_NAME: self.name}  # the Job controller sets it
        attempt = str(self.attempt)
        return {names.JOB_LABEL: self.job.metadata.name, names.ATTEMPT_LABEL: attempt}

    def metadata(self) -> JsonObject:
        """Return the `metadata` of the group, with the name of the child Job.

        The TorchrunJob owns the group, because the group is created before the child Job.
        """
        meta = metadata(self.job, self.name, names.GANG)
        labels = meta["labels"]
        assert isinstance(labels, dict)
        return {**meta, "labels": {**labels, names.ATTEMPT_LABEL: str(self.attempt)}}


class GangObjects(Struct, frozen=True, kw_only=True):
    """Objects that are created before the child Job, and patches of the Job and its pods.

    `job` and `template` are strategic merge patches of the child Job and its pod template.
    """

    groups: tuple[Apply, ...] = ()
    job: JsonObject = field(default_factory=dict)
    template: JsonObject = field(default_factory=dict)


def accept_queue(queue: TorchrunQueue) -> None:
    """Accept any queue: the `check_queue` of most gang schedulers."""


class GangScheduler(Struct, frozen=True, kw_only=True):
    """What the controller does for one gang scheduler; `api` has its names.

    The API server must serve one of `kinds`; if it does not, `install_hint` is shown. `build`
    builds the objects of a gang and may raise InvalidSpecError, as may `check_queue` for a queue
    that requests the gang scheduler. `refusals` are conditions of its groups, as type and status,
    which mean that a gang is not scheduled or not admitted. `waiting_reason` is the reason of a job
    whose child Job it has not admitted yet (see `admits_jobs`).
    """

    api: GangSchedulerApi
    build: Callable[[ScheduledGang], GangObjects]
    kinds: tuple[Kind[SchedulingGroup], ...] = ()
    install_hint: str = ""
    refusals: tuple[tuple[str, str], ...] = ()
    # False: the scheduler creates the groups of its gangs itself, and the controller reads them.
    creates_groups: bool = True
    # Kinds that the controller reads or writes besides groups, where they are served.
    other_kinds: tuple[Kind[Any], ...] = ()
    check_queue: Callable[[TorchrunQueue], None] = accept_queue
    waiting_reason: str = ""


def topology_affinity(
    template: JsonObject, labels: JsonObject, topology: Topology | None
) -> JsonObject:
    """Return a patch of the pod template that places the pods with these labels close together.

    The first pod matches its own term, so it may be placed anywhere (kubernetes.io, "Inter-pod
    affinity and anti-affinity"). The terms that the template has are kept.
    """
    if topology is None:
        return {}
    present = object_at(object_at(object_at(template, "spec"), "affinity"), "podAffinity")
    terms: JsonObject = {}
    if topology.required is not None:
        required = _term(labels, topology.required)
        terms[_REQUIRED] = [*_terms_at(present, _REQUIRED), required]
    if topology.preferred is not None:
        preferred: JsonObject = {
            "weight": 100,
            "podAffinityTerm": _term(labels, topology.preferred),
        }
        terms[_PREFERRED] = [*_terms_at(present, _PREFERRED), preferred]
    return {"spec": {"affinity": {"podAffinity": terms}}}


def _term(labels: JsonObject, key: str) -> JsonObject:
    return {"topologyKey": key, "labelSelector": {"matchLabels": labels}}


def _terms_at(affinity: JsonObject, name: str) -> list[JsonValue]:
    terms = affinity.get(name)
    return terms if isinstance(terms, list) else []
