"""What is deleted of a gang of two Jobs, of which one has gone or has succeeded, see `roles`."""

from datetime import datetime

from torchrun_api import names
from torchrun_controller.reconcile.gang import fence, gang
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.pods import head_and_workers


def end_workers(observed: Observed) -> tuple[Delete, ...]:
    """Those beside a head, which has ended."""
    beside = (pod for pod in observed.gang.workers if pod.metadata.labels.role == names.WORKER)
    return gang.end(tuple(beside), gang.SURVIVOR_GRACE)


def delete_half(observed: Observed, now: datetime) -> tuple[Delete, ...]:
    """The head's Job of a gang whose workers' Job is gone, once the status has what it tells."""
    if (
        head_and_workers.is_whole(observed.gang)
        or not gang.is_in_status(observed)
        or fence.unrecorded(observed, now)
    ):
        return ()
    return (gang.delete(observed.gang.current_job),)


def delete_headless(observed: Observed) -> tuple[Delete, ...]:
    """Workers' Jobs whose head's Job was never made, or is gone: they go with it."""
    return tuple(gang.delete(job) for job in head_and_workers.find_headless_jobs(observed.gang))
