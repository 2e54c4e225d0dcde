"""Coscheduling of scheduler-plugins: a PodGroup, and pods with its name in a label.

It is a kube-scheduler with this plugin, in addition to the default scheduler or instead of it.
Topology is pod affinity.
"""

from torchrun_api.json import JsonObject
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

COSCHEDULING_POD_GROUPS = Kind(
    "scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup", SchedulingGroup
)
_POD_GROUP = "scheduling.x-k8s.io/pod-group"


def build(gang: ScheduledGang) -> GangObjects:
    """Build the PodGroup."""
    group: JsonObject = {
        "apiVersion": COSCHEDULING_POD_GROUPS.api_version,
        "kind": COSCHEDULING_POD_GROUPS.kind,
        "metadata": gang.metadata(),
        # Without minResources: the plugin rejects a gang that lacks them before it looks at
        # machines, and a pod that ends does not make the scheduler try such a gang again for 5
        # minutes.
        "spec": {"minMember": gang.least},
    }
    return GangObjects(
        groups=(Apply(COSCHEDULING_POD_GROUPS, group),),
        template=merge(
            topology_affinity(gang.template, gang.labels, gang.topology),
            {"metadata": {"labels": {_POD_GROUP: gang.name}}},
        ),
    )


COSCHEDULING = GangScheduler(
    api=GANG_SCHEDULERS["coscheduling"],
    build=build,
    kinds=(COSCHEDULING_POD_GROUPS,),
    install_hint="Install scheduler-plugins with Coscheduling",
)
