"""Gang scheduling of Kubernetes, as each release has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GROUP = "scheduling.k8s.io"


@dataclass(frozen=True)
class NativeRelease:
    """The group objects of a release, and the feature gates of its components.

    `basic` is the spec of a group without a gang. With `alpha_gates`, groups have a topology, and
    the Job controller creates groups itself.
    """

    version: str
    plural: str
    kind: str
    basic: Mapping[str, Any]
    scheduler_gates: Sequence[str] = ()
    alpha_gates: Sequence[str] = ()

    @property
    def serving(self) -> str:
        """The flag with which kube-apiserver serves the group objects."""
        return f"--runtime-config={GROUP}/{self.version}=true"

    def path(self, namespace: str) -> str:
        """The path of the group objects of a namespace."""
        return f"/apis/{GROUP}/{self.version}/namespaces/{namespace}/{self.plural}"

    def flags(self, *further_gates: str) -> dict[str, list[str]]:
        """The flags of the components, for LocalCluster."""
        gates = ",".join(("--feature-gates=GenericWorkload=true", *further_gates))
        return {
            "kube-apiserver": [gates, self.serving],
            "kube-scheduler": [",".join((gates, *self.scheduler_gates))],
            # From 1.36 on, it removes the finalizers of unused PodGroups.
            "kube-controller-manager": [gates],
        }


_ALPHA = ("TopologyAwareWorkloadScheduling=true", "WorkloadWithJob=true")
_POD_GROUP: tuple[str, str, Mapping[str, Any]] = (
    "podgroups",
    "PodGroup",
    {"schedulingPolicy": {"basic": {}}},
)
NATIVE: Mapping[str, NativeRelease] = {
    "1.35": NativeRelease(
        *("v1alpha1", "workloads", "Workload"),
        {"podGroups": [{"name": "other", "policy": {"basic": {}}}]},
        scheduler_gates=("GangScheduling=true",),
    ),
    "1.36": NativeRelease(
        "v1alpha2",
        *_POD_GROUP,
        scheduler_gates=("GangScheduling=true",),
        alpha_gates=_ALPHA,
    ),
    # GangScheduling is merged into GenericWorkload.
    "1.37": NativeRelease("v1beta1", *_POD_GROUP, alpha_gates=_ALPHA),
}
"""By release; older ones have none."""
