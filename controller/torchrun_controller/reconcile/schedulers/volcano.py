"""Volcano: a PodGroup, and pods that name it (https://volcano.sh/en/docs/podgroup/).

Volcano has tiers of HyperNodes as topology. The keys volcano.sh/tier-2 (by number) and
volcano.sh/rack (by name) select a tier. Any other key is a node label and becomes pod affinity,
which Volcano honours as well.
"""

from msgspec.structs import replace

from torchrun_api.json import JsonObject
from torchrun_api.kinds.admission import Topology
from torchrun_api.kinds.core import SchedulingGroup
from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS
from torchrun_api.kinds.resources import Kind
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.schedulers.scheduler import (
    GangObjects,
    GangScheduler,
    ScheduledGang,
    topology_affinity,
)
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.requests import total_requests

VOLCANO_POD_GROUPS = Kind(
    "scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup", SchedulingGroup
)
DEFAULT_QUEUE = "default"
_GROUP_NAME = "scheduling.k8s.io/group-name"
_TIER = "volcano.sh/"
_TIER_NUMBER = "volcano.sh/tier-"


def build(gang: ScheduledGang) -> GangObjects:
    """Build the PodGroup."""
    queue = gang.queue.spec.scheduling.queue_name or DEFAULT_QUEUE
    spec: JsonObject = {
        "minMember": gang.least,
        "minResources": total_requests(gang.parts),
        "queue": queue,
    }
    if gang.priority_class_name:
        spec["priorityClassName"] = gang.priority_class_name
    tier, label_topology = _split_topology(gang.topology)
    if tier:
        spec["networkTopology"] = tier
    group: JsonObject = {
        "apiVersion": VOLCANO_POD_GROUPS.api_version,
        "kind": VOLCANO_POD_GROUPS.kind,
        "metadata": gang.metadata(),
        "spec": spec,
    }
    return GangObjects(
        groups=(Apply(VOLCANO_POD_GROUPS, group),),
        template=merge(
            topology_affinity(gang.template, gang.labels, label_topology),
            {"metadata": {"annotations": {_GROUP_NAME: gang.name}}},
        ),
    )


def _split_topology(topology: Topology | None) -> tuple[JsonObject, Topology | None]:
    """Return the `networkTopology` of the PodGroup, and the topology by node labels."""
    if topology is None:
        return {}, None
    required, preferred = topology.required or "", topology.preferred or ""
    if required.startswith(_TIER):
        label = None if not preferred or preferred.startswith(_TIER) else preferred
        by_label = replace(topology, required=None, preferred=label)
        return _network_topology("hard", required), by_label
    if preferred.startswith(_TIER):
        return _network_topology("soft", preferred), replace(topology, preferred=None)
    return {}, topology


def _network_topology(mode: str, key: str) -> JsonObject:
    number = key.removeprefix(_TIER_NUMBER)
    if number.isdecimal():
        return {"mode": mode, "highestTierAllowed": int(number)}
    return {"mode": mode, "highestTierName": key.removeprefix(_TIER)}


VOLCANO = GangScheduler(
    api=GANG_SCHEDULERS["volcano"],
    build=build,
    kinds=(VOLCANO_POD_GROUPS,),
    install_hint="Install Volcano",
    refusals=(("Unschedulable", "True"),),
)
