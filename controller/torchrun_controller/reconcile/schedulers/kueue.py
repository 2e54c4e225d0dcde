"""Kueue: the child Job waits in a LocalQueue, and Kueue resumes it once it is admitted.

The label with the name of the LocalQueue makes Kueue manage the Job, because its owner is of a kind
that Kueue does not know. The Job is created suspended, as Kueue's webhook would make it, so that it
does not start while the webhook is down. After that Kueue owns spec.suspend and the node selectors
of the pods. Kueue admits all workers or none: partial admission is off unless a Job asks for it.

Kueue reads one topology annotation, so a preferred topology is ignored beside a required one.
"""

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import SchedulingGroup
from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import Kind
from torchrun_controller.reconcile.schedulers.scheduler import (
    GangObjects,
    GangScheduler,
    ScheduledGang,
)
from torchrun_controller.reconcile.spec.errors import InvalidSpecError

# Kueue creates these itself.
KUEUE_WORKLOADS = (
    Kind("kueue.x-k8s.io", "v1beta2", "workloads", "Workload", SchedulingGroup),
    Kind("kueue.x-k8s.io", "v1beta1", "workloads", "Workload", SchedulingGroup),
)
_API = GANG_SCHEDULERS["kueue"]
_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"


def build(gang: ScheduledGang) -> GangObjects:
    """Build the labels, annotations and spec.suspend. Kueue creates the Workload."""
    queue = gang.queue.spec.scheduling.queue_name or gang.queue.metadata.name
    annotations: JsonObject = {}
    if gang.topology is not None and gang.topology.required is not None:
        annotations = {_REQUIRED: gang.topology.required}
    elif gang.topology is not None:
        annotations = {_PREFERRED: gang.topology.preferred}
    return GangObjects(
        job={"metadata": {"labels": {_API.queue_label: queue}}, "spec": {"suspend": True}},
        template={"metadata": {"annotations": annotations}} if annotations else {},
    )


def check_queue(queue: TorchrunQueue) -> None:
    """Refuse a name that is too long for the label from which Kueue reads the LocalQueue.

    Raises:
        InvalidSpecError: the name of the LocalQueue has more than MAX_LABEL characters.
    """
    local_queue = queue.spec.scheduling.queue_name
    name, field = (
        (queue.metadata.name, "name") if local_queue is None else (local_queue, "queueName")
    )
    if len(name) > names.MAX_LABEL:
        raise InvalidSpecError(
            f"TorchrunQueue {queue.metadata.name} sets scheduling.gang to kueue, but its {field}"
            f" has {len(name)} characters and the label for Kueue's LocalQueue allows"
            f" {names.MAX_LABEL}. Set scheduling.queueName to a LocalQueue with a shorter name."
        )


KUEUE = GangScheduler(
    api=_API,
    build=build,
    kinds=KUEUE_WORKLOADS,
    creates_groups=False,
    install_hint="Install Kueue",
    refusals=(("QuotaReserved", "False"),),
    check_queue=check_queue,
    waiting_reason="WaitingForKueue",
)
