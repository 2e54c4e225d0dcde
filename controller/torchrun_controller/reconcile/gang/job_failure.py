"""The failure of a child Job that none of its pods explains, as far as the cache shows them."""

from datetime import datetime, timedelta

from torchrun_api.core import Job
from torchrun_api.meta import Condition
from torchrun_api.status import LastFailure, WorkersStatus
from torchrun_controller.reconcile.gang import peer_loss
from torchrun_controller.reconcile.gang.failures import Failure
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive

# How long a failed Job waits for the ends of its pods, which show the root cause: watches lag. A
# watch that fails repeatedly is retried after 60 s at the latest.
WATCH_LAG = timedelta(seconds=70)


def find_failure(
    gang: ObservedGang, child: Job, failed: Condition, recorded: WorkersStatus | None
) -> Failure:
    """Return the failure of a Job by its condition. `recorded`: the workers in the status, if any.

    Missing pods that have run were removed, which is a disruption. Others may have failed unseen.
    """
    return Failure(
        details=LastFailure(
            reason=failed.reason or "JobFailed",
            message=failed.message or f"Job {child.metadata.name} failed",
            time=failed.last_transition_time,
        ),
        disruption=_misses_pods(gang) and (recorded is None or not recorded.pending),
    )


def seconds_left(
    gang: ObservedGang,
    child: Job,
    failure: LastFailure,
    recorded: WorkersStatus | None,
    now: datetime,
) -> float | None:
    """Return the seconds for which the cache may still show the ends of the pods; None for no wait.

    A Job fails only when all of its pods have ended. A pod that still runs in the cache is outdated
    there, and a pod that was never seen may be new. A pod that was seen and is gone was removed.
    """
    own_pods = (pod for pod in gang.workers if pod.metadata.controlled_by(child.metadata.uid))
    is_outdated = any(alive(pod) for pod in own_pods)
    has_unseen_pods = _misses_pods(gang) and (recorded is None or recorded.pending > 0)
    return peer_loss.wait_left(failure, now, WATCH_LAG) if is_outdated or has_unseen_pods else None


def _misses_pods(gang: ObservedGang) -> bool:
    return len(gang.workers) < head_and_workers.nodes_of(gang.current_job)
