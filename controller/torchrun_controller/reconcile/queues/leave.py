"""The end of a queue: it waits for the jobs that run by it, then cleans up and goes."""

from datetime import datetime

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds import KAI_QUEUES, TORCHRUN_QUEUES
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.queues import jobs, kai, status
from torchrun_controller.reconcile.queues.observed import ObservedQueue, QueuePlan

NAMED = 5  # jobs that a message names


def hold(observed: ObservedQueue) -> tuple[Apply, ...]:
    """Put our finalizer on a queue that has none."""
    queue = observed.queue
    refused = (TORCHRUN_QUEUES.resource, queue.metadata.name) in observed.refused
    if names.QUEUE_FINALIZER in queue.metadata.finalizers or refused:
        return ()
    return (_finalizers(queue, [names.QUEUE_FINALIZER]),)


def leave(observed: ObservedQueue, now: datetime) -> QueuePlan:
    """Wait, remove the KAI queue, let go: its other objects go with their owner."""
    queue = observed.queue
    if names.QUEUE_FINALIZER not in queue.metadata.finalizers:
        return QueuePlan()
    running = sorted(job.metadata.name for job in observed.jobs if jobs.runs(job))
    if running:
        more = f" and {len(running) - NAMED} more" if len(running) > NAMED else ""
        named = ", ".join(running[:NAMED]) + more
        return _wait(observed, f"waits for the jobs that run: {named}", now)
    if _unseen(observed):
        why = observed.unseen.get(KAI_QUEUES.resource, "the cache is being filled")
        return _wait(observed, f"KAI's queues are not known, and one is to be removed: {why}", now)
    left = kai.release(observed)
    refused = {q.metadata.name: observed.refused.get(kai.key(q)) for q in left}
    stuck = [f"{name}: {why}" for name, why in refused.items() if why is not None]
    if stuck:
        return _wait(observed, f"the KAI queue cannot be removed: {'; '.join(stuck)}", now)
    if left:
        return QueuePlan(deletes=tuple(kai.delete(q) for q in left))
    return QueuePlan(applies=(_finalizers(queue, []),))


def _unseen(observed: ObservedQueue) -> bool:
    """Whether there is a KAI queue of ours that cannot be seen."""
    installed = observed.installed
    if observed.kai is not None or (installed is not None and not installed.serves(KAI_QUEUES)):
        return False
    conditions = observed.queue.status.conditions
    return any(c.type == kai.CONDITION and c.reason == kai.KEPT for c in conditions)


def _wait(observed: ObservedQueue, message: str, now: datetime) -> QueuePlan:
    composed = status.terminating(observed, message, now)
    if composed == status.present(observed):
        return QueuePlan()
    return QueuePlan(status=composed, events=status.events(observed, composed))


def _finalizers(queue: TorchrunQueue, finalizers: list[str]) -> Apply:
    meta = queue.metadata
    body: JsonObject = {
        "apiVersion": TORCHRUN_QUEUES.api_version,
        "kind": TORCHRUN_QUEUES.kind,
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "finalizers": [*finalizers],
        },
    }
    return Apply(TORCHRUN_QUEUES, body, meta.uid)
