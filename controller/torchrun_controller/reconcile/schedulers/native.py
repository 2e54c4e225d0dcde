"""Gang scheduling of kube-scheduler (kubernetes.io, "Gang Scheduling").

The newest served version is used. Since 1.36 a PodGroup has its own policy and needs no Workload;
1.35 has the policy in a Workload. The priority and the topology of a PodGroup need further feature
gates in some releases, and the API server drops them without these gates. Pod affinity alone places
pods in one topology domain, but it does not try another domain if the first one is too small.
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

# Each Kubernetes minor release has broken with the one before, from 1.37 back to 1.35.
NATIVE_GROUPS = (
    Kind("scheduling.k8s.io", "v1beta1", "podgroups", "PodGroup", SchedulingGroup),
    Kind("scheduling.k8s.io", "v1alpha2", "podgroups", "PodGroup", SchedulingGroup),
    Kind("scheduling.k8s.io", "v1alpha1", "workloads", "Workload", SchedulingGroup),
)
_POD_GROUP = "workers"  # its name in a Workload


def build(gang: ScheduledGang) -> GangObjects:
    """Build the PodGroup or the Workload."""
    kind = next(kind for kind in NATIVE_GROUPS if gang.installed.serves(kind))
    policy: JsonObject = {"gang": {"minCount": gang.least}}
    spec: JsonObject
    pod: JsonObject
    if kind.kind == "Workload":
        spec = {"podGroups": [{"name": _POD_GROUP, "policy": policy}]}
        pod = {"workloadRef": {"name": gang.name, "podGroup": _POD_GROUP}}
    else:
        spec = {"schedulingPolicy": policy, **_priority(gang), **_topology(gang)}
        pod = {"schedulingGroup": {"podGroupName": gang.name}}
    group: JsonObject = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": gang.metadata(),
        "spec": spec,
    }
    return GangObjects(
        groups=(Apply(kind, group),),
        template=merge(topology_affinity(gang.template, gang.labels, gang.topology), {"spec": pod}),
    )


def _priority(gang: ScheduledGang) -> JsonObject:
    """kube-scheduler refuses pods of another priority than their group has: by default 0."""
    name = gang.priority_class_name
    return {"priorityClassName": name} if name else {}


def _topology(gang: ScheduledGang) -> JsonObject:
    required = gang.topology.required if gang.topology else None
    return {"schedulingConstraints": {"topology": [{"key": required}]}} if required else {}


NATIVE = GangScheduler(
    api=GANG_SCHEDULERS["native"],
    build=build,
    kinds=NATIVE_GROUPS,
    install_hint=(
        "Enable the feature gate GenericWorkload in kube-apiserver, kube-controller-manager and"
        " kube-scheduler (Kubernetes 1.35 or newer), before 1.37 also GangScheduling in"
        " kube-scheduler, and start kube-apiserver with"
        " --runtime-config=scheduling.k8s.io/<version>=true"
    ),
    # Kubernetes 1.36 has the first, 1.37 the second.
    refusals=(("PodGroupScheduled", "False"), ("PodGroupInitiallyScheduled", "False")),
)
