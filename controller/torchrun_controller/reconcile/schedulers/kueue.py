"""Kueue: the child Job goes through a LocalQueue and is started by Kueue once it is admitted.

Kueue takes a Job for its own by the label with the queue's name, as its owner is of a kind that
Kueue does not know. The Job is made suspended, as Kueue's webhook would have it, so that it does
not start where the webhook is down; from then on spec.suspend and the pods' selectors are Kueue's.
All workers are admitted together or none: partial admission is off unless a Job asks for it.

Kueue takes one topology annotation: where both are given, the required one.
"""

from torchrun_api.json import JsonObject
from torchrun_api.kinds import KUEUE_WORKLOADS
from torchrun_controller.reconcile.schedulers.scheduler import Gang, GangObjects, GangScheduler

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"


def build(gang: Gang) -> GangObjects:
    """Labels, annotations and spec.suspend; Kueue makes the Workload itself."""
    queue = gang.queue.spec.scheduling.queue_name or gang.queue.metadata.name
    annotations: JsonObject = {}
    if gang.topology is not None and gang.topology.required is not None:
        annotations = {_REQUIRED: gang.topology.required}
    elif gang.topology is not None:
        annotations = {_PREFERRED: gang.topology.preferred}
    return GangObjects(
        job={"metadata": {"labels": {QUEUE_LABEL: queue}}, "spec": {"suspend": True}},
        template={"metadata": {"annotations": annotations}} if annotations else {},
    )


KUEUE = GangScheduler(
    name="kueue",
    build=build,
    kinds=KUEUE_WORKLOADS,
    creates_groups=False,
    install_hint="install Kueue",
    refusals=(("QuotaReserved", "False"),),
)
