"""KAI: the controller creates the PodGroup, because KAI's podgrouper would create gangs of one pod.

KAI 0.15 or newer honours the annotation that disables its podgrouper for a pod. The topology is in
the PodGroup: only the podgrouper reads the annotations kai.scheduler/topology*.

KAI runs jobs that cannot be preempted, by default those with a priority of 100 or more, only within
the guaranteed quota of their queue (docs/priority of KAI 0.12).
"""

from torchrun_api.json import JsonObject
from torchrun_api.kinds.admission import Topology
from torchrun_api.kinds.core import SchedulingGroup
from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import KAI_QUEUES, KAI_TOPOLOGIES, Kind
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.schedulers.scheduler import (
    GangObjects,
    GangScheduler,
    ScheduledGang,
)
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

KAI_POD_GROUPS = Kind("scheduling.run.ai", "v2alpha2", "podgroups", "PodGroup", SchedulingGroup)
# The installation of KAI creates this queue.
DEFAULT_QUEUE = "default-queue"
QUEUE_CONDITION, NOT_MANAGED = "KaiQueueReady", "NotManaged"  # of a TorchrunQueue
_QUEUE_LABEL = "kai.scheduler/queue"
_SKIP = "kai.scheduler/skip-podgrouper"
_GROUP_NAME = "pod-group-name"


def build(gang: ScheduledGang) -> GangObjects:
    """Build the PodGroup."""
    queue = gang.queue.spec.kai_queue or DEFAULT_QUEUE
    spec: JsonObject = {"minMember": gang.least, "queue": queue}
    if gang.priority_class_name:
        spec["priorityClassName"] = gang.priority_class_name
    if not gang.kai_quota and _is_managed(gang.queue):
        spec["preemptibility"] = "preemptible"
    if gang.topology is not None:
        spec["topologyConstraint"] = _constraint(gang.topology, gang.installed.topologies)
    meta = gang.metadata()
    labels = meta["labels"]
    assert isinstance(labels, dict)
    group: JsonObject = {
        "apiVersion": KAI_POD_GROUPS.api_version,
        "kind": KAI_POD_GROUPS.kind,
        "metadata": {**meta, "labels": {**labels, _QUEUE_LABEL: queue}},
        "spec": spec,
    }
    in_queue: JsonObject = {"labels": {_QUEUE_LABEL: queue}}
    skip: JsonObject = {_SKIP: "true"}
    return GangObjects(
        groups=(Apply(KAI_POD_GROUPS, group),),
        job={"metadata": {"annotations": skip}},
        template={"metadata": {**in_queue, "annotations": {_GROUP_NAME: gang.name, **skip}}},
    )


def _is_managed(queue: TorchrunQueue) -> bool:
    """Whether the controller writes the KAI queue, instead of KAI or an administrator."""
    reasons = {c.type: c.reason for c in queue.status.conditions}
    return bool(queue.spec.kai_queue) and reasons.get(QUEUE_CONDITION) != NOT_MANAGED


def _constraint(topology: Topology, topologies: tuple[str, ...]) -> JsonObject:
    name = topology.name or next(iter(topologies), None)
    if name is None:
        raise InvalidSpecError(
            "scheduling.topology requires a KAI Topology object with its keys, but none exists."
            " Create one (see kubectl get topologies.kai.scheduler)."
        )
    constraint: JsonObject = {"topology": name}
    if topology.required is not None:
        constraint["requiredTopologyLevel"] = topology.required
    if topology.preferred is not None:
        constraint["preferredTopologyLevel"] = topology.preferred
    return constraint


KAI = GangScheduler(
    api=GANG_SCHEDULERS["kai"],
    build=build,
    kinds=(KAI_POD_GROUPS,),
    other_kinds=(KAI_QUEUES, KAI_TOPOLOGIES),
    install_hint="Install KAI Scheduler 0.15 or newer",
    refusals=(("UnschedulableOnNodePool", "True"),),
)
