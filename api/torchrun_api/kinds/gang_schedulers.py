"""The gang schedulers: one entry for each value of spec.scheduling.gang.

The CRDs, the controller and `kubectl torchrun doctor` share these entries. The objects that the
controller builds for a scheduler are in a separate file in `reconcile/schedulers`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

GangScheduling: TypeAlias = Literal["kai", "volcano", "coscheduling", "native", "kueue", "none"]


class GangSchedulerApi(NamedTuple):
    """A gang scheduler, with its names in the API.

    `api_group` is served only where the scheduler is installed; "" if there is no such group.
    `pod_scheduler` is the usual schedulerName of the pods, "" if they need none.
    `pods_scheduled_by` is what binds the pods: the gang scheduler itself, kube-scheduler (with or
    without a plugin), or any scheduler. With `admits_jobs`, each child Job is created suspended,
    and the gang scheduler resumes it. `queue_label` is the label that has the name of its queue.
    """

    name: GangScheduling
    title: str
    api_group: str = ""
    pod_scheduler: str = ""
    pods_scheduled_by: Literal["itself", "kube-scheduler", "any"] = "kube-scheduler"
    admits_jobs: bool = False
    queue_label: str = ""


_ENTRIES = (
    GangSchedulerApi(
        name="kai",
        title="KAI",
        api_group="scheduling.run.ai",
        pod_scheduler="kai-scheduler",
        pods_scheduled_by="itself",
    ),
    GangSchedulerApi(
        name="volcano",
        title="Volcano",
        api_group="scheduling.volcano.sh",
        pod_scheduler="volcano",
        pods_scheduled_by="itself",
    ),
    GangSchedulerApi(
        name="coscheduling",
        title="Coscheduling",
        api_group="scheduling.x-k8s.io",
        pod_scheduler="scheduler-plugins-scheduler",
    ),
    GangSchedulerApi(name="native", title="kube-scheduler"),
    GangSchedulerApi(
        name="kueue",
        title="Kueue",
        api_group="kueue.x-k8s.io",
        pods_scheduled_by="any",
        admits_jobs=True,
        queue_label="kueue.x-k8s.io/queue-name",
    ),
    GangSchedulerApi(name="none", title="no gang scheduler", pods_scheduled_by="any"),
)
GANG_SCHEDULERS: Mapping[GangScheduling, GangSchedulerApi] = MappingProxyType(
    {entry.name: entry for entry in _ENTRIES}
)
