"""A worker on a lost node, of a child Job that Kueue or a user has suspended.

The Job creates the new pods of its resumption in the same attempt, so they have no epoch of their
own by which their launchers could fence the worker. The attempt ends, and the next one fences it.
"""

from datetime import datetime

from torchrun_api.status import LastFailure, UnfencedWorker
from torchrun_controller.reconcile.gang.failures import Failure
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.times import seconds_left
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, index_of
from torchrun_controller.reconcile.pods.nodes import LOST_AFTER


def find_loss(
    gang: ObservedGang, unfenced: tuple[UnfencedWorker, ...], now: datetime
) -> tuple[Failure | None, float | None]:
    """Return the loss that ends the attempt, and else the seconds until there may be one.

    While the Job is suspended, the node has as long to recover as that of a gang that runs. A Job
    that has resumed ends at once: a gate of its new pods must not open.
    """
    workers = _left_behind(gang, unfenced)
    if not workers:
        return None, None
    first = min(workers, key=lambda worker: worker.since or now)
    wait = seconds_left(LOST_AFTER, first.since, now)
    child = gang.current_job
    if child.spec.suspend and wait > 0:
        return None, wait
    message = (
        f"Node {first.node} is lost. A pod from before the suspension of Job {child.metadata.name}"
        " may still run there."
    )
    details = LastFailure(node=first.node, reason="NodeLost", message=message, time=first.since)
    return Failure(details=details, disruption=True), None


def _left_behind(
    gang: ObservedGang, unfenced: tuple[UnfencedWorker, ...]
) -> tuple[UnfencedWorker, ...]:
    """Return the workers of the present attempt that may still run from before a suspension."""
    child = gang.current_job
    attempt = attempt_of(child)
    own_workers = tuple(worker for worker in unfenced if worker.attempt == attempt)
    if not own_workers or child.spec.suspend:
        return own_workers
    if head_and_workers.resumption_of(gang) is None:
        return ()
    new_pods = head_and_workers.pods_since_resumption(gang)
    present = {(index_of(pod), pod.spec.node_name) for pod in new_pods}
    return tuple(worker for worker in own_workers if (worker.index, worker.node) not in present)
