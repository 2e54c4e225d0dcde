"""The finalizer of a queue: it waits for running jobs, then removes the KAI queue."""

from datetime import datetime

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import KAI_QUEUES, TORCHRUN_QUEUES
from torchrun_controller.reconcile.model.messages import list_names, sentence
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.queue import kai, status
from torchrun_controller.reconcile.queue.model import ObservedQueue, QueuePlan, needs_queue

NAMES = 5  # most job names in a message


def set_finalizer(observed: ObservedQueue) -> tuple[Apply, ...]:
    """Add the finalizer to a queue that lacks it.

    A controller of one namespace has its rights by a RoleBinding in it, which the deletion of the
    namespace removes first. A finalizer would then stay for ever, so only a KAI queue gets one.
    """
    queue = observed.queue
    is_refused = (TORCHRUN_QUEUES.resource, queue.metadata.name) in observed.refused
    is_wanted = not observed.namespace or bool(queue.spec.kai_queue)
    if (names.QUEUE_FINALIZER in queue.metadata.finalizers) is is_wanted or is_refused:
        return ()
    if not is_wanted:
        return (_remove_finalizer(queue),)
    body: JsonObject = {
        "apiVersion": TORCHRUN_QUEUES.api_version,
        "kind": TORCHRUN_QUEUES.kind,
        "metadata": {
            "name": queue.metadata.name,
            "namespace": queue.metadata.namespace,
            "finalizers": [names.QUEUE_FINALIZER],
        },
    }
    return (Apply(TORCHRUN_QUEUES, body, queue.metadata.uid),)


def finalize(observed: ObservedQueue, now: datetime) -> QueuePlan:
    """Wait for jobs, then remove the KAI queue and the finalizer; owned objects follow."""
    queue = observed.queue
    if names.QUEUE_FINALIZER not in queue.metadata.finalizers:
        return QueuePlan()
    running_jobs = [job.metadata.name for job in observed.jobs if needs_queue(job)]
    if running_jobs:
        return _wait(observed, f"Waiting for running jobs: {list_names(running_jobs, NAMES)}.", now)
    if _hides_kai_queue(observed):
        why = observed.kai_problem
        message = f"The KAI queue cannot be removed, because KAI queues cannot be read: {why}"
        return _wait(observed, sentence(message), now)
    removable = kai.find_removable(observed)
    refusals = {q.metadata.name: observed.refused.get(kai.key(q)) for q in removable}
    problems = [f"{name}: {why}" for name, why in refusals.items() if why is not None]
    if problems:
        message = sentence(f"The KAI queue cannot be removed: {'; '.join(problems)}")
        return _wait(observed, message, now)
    if removable:
        return QueuePlan(deletes=tuple(kai.delete(q) for q in removable))
    return QueuePlan(applies=(_remove_finalizer(queue),))


def _hides_kai_queue(observed: ObservedQueue) -> bool:
    """Whether the queue has a KAI queue that cannot be read."""
    installed = observed.installed
    if observed.kai is not None or (installed is not None and not installed.serves(KAI_QUEUES)):
        return False
    conditions = observed.queue.status.conditions
    return any(c.type == kai.CONDITION and c.reason in kai.WRITTEN for c in conditions)


def _wait(observed: ObservedQueue, message: str, now: datetime) -> QueuePlan:
    composed = status.compose_terminating(observed, message, now)
    if composed == status.own_part(observed):
        return QueuePlan()
    return QueuePlan(status=composed, events=status.events(observed, composed))


def _remove_finalizer(queue: TorchrunQueue) -> Apply:
    """Remove the finalizer from exactly this version, even if others have applied it as well.

    `kubectl apply --server-side` of a file that `kubectl get -o yaml` wrote owns it, too.
    """
    meta = queue.metadata
    body: JsonObject = {
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "resourceVersion": meta.resource_version,
            "finalizers": [name for name in meta.finalizers if name != names.QUEUE_FINALIZER],
        }
    }
    return Apply(TORCHRUN_QUEUES, body, meta.uid, merge=True)
