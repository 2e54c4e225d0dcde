"""Kueue: the child Job waits in a LocalQueue, and Kueue resumes it once it is admitted.

The label with the name of the LocalQueue makes Kueue manage the Job, because its owner is of a kind
that Kueue does not know. The Job is created suspended, as Kueue's webhook would make it, so that it
does not start while the webhook is down. After that Kueue owns spec.suspend and the node selectors
of the pods. Kueue admits all workers or none: partial admission is off unless a Job asks for it.

Kueue reads one topology annotation, so a preferred topology is ignored beside a required one.
"""

from torchrun_api.json import JsonObject
from torchrun_api.kinds import KUEUE_WORKLOADS
from torchrun_controller.reconcile.schedulers.scheduler import Gang, GangObjects, GangScheduler

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"


def build(gang: Gang) -> GangObjects:
    """Build the labels, annotations and spec.suspend. Kueue creates the Workload."""
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
    install_hint="Install Kueue",
    refusals=(("QuotaReserved", "False"),),
)
