"""Kubernetes' own gang scheduling, by kube-scheduler (kubernetes.io, "Gang Scheduling").

The newest version that is served. From 1.36 on a PodGroup carries its policy itself and its
Workload is optional, so none is made; 1.35 has the policy in a Workload. Topology is pod affinity,
as a PodGroup's own needs one more feature gate.
"""

from torchrun_api.json import JsonObject
from torchrun_api.kinds import NATIVE_GROUPS
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.schedulers.affinity import near_each_other
from torchrun_controller.reconcile.schedulers.scheduler import Gang, GangObjects, GangScheduler
from torchrun_controller.reconcile.spec.merge import merge

# Within a Workload.
_POD_GROUP = "workers"


def build(gang: Gang) -> GangObjects:
    """The PodGroup or Workload; a pod that probes needs none."""
    kind = next(kind for kind in NATIVE_GROUPS if gang.installed.serves(kind))
    policy: JsonObject = {"gang": {"minCount": gang.least}}
    spec: JsonObject
    pod: JsonObject
    if kind.kind == "Workload":
        spec = {"podGroups": [{"name": _POD_GROUP, "policy": policy}]}
        pod = {"workloadRef": {"name": gang.name, "podGroup": _POD_GROUP}}
    else:
        spec = {"schedulingPolicy": policy}
        pod = {"schedulingGroup": {"podGroupName": gang.name}}
    if kind.version == "v1beta1" and gang.priority_class_name:
        # Without it the group has priority 0, whatever its pods have.
        spec["priorityClassName"] = gang.priority_class_name
    group: JsonObject = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": gang.metadata(),
        "spec": spec,
    }
    return GangObjects(
        groups=(Apply(kind, group),),
        template=merge(near_each_other(gang.template, gang.labels, gang.topology), {"spec": pod}),
    )


NATIVE = GangScheduler(
    name="native",
    build=build,
    kinds=NATIVE_GROUPS,
    install_hint=(
        "give kube-apiserver and kube-scheduler (Kubernetes 1.35 or newer) the feature gates"
        " GenericWorkload and GangScheduling, and kube-apiserver"
        " --runtime-config=scheduling.k8s.io/<version>=true"
    ),
    # Of Kubernetes 1.36, and of 1.37.
    refusals=(("PodGroupScheduled", "False"), ("PodGroupInitiallyScheduled", "False")),
)
