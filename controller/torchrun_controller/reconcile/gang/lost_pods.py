"""The ends of pods that were replaced alone, as the status of the job records them."""

from collections.abc import Iterable

from torchrun_api.core import Pod
from torchrun_api.job import TorchrunJob
from torchrun_api.status import Attempt
from torchrun_controller.reconcile.model.attempts import order_of
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.pods.head_and_workers import resumption_of
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, index_of, predecessors_of


def find_records(job: TorchrunJob, gang: ObservedGang) -> tuple[Attempt, ...]:
    """Return the ends of lost pods of the present gang that the status has.

    A Job that resumes after a suspension starts to count again for its new pods.
    """
    child, since = gang.current_job, resumption_of(gang)
    return tuple(
        end
        for end in job.status.attempts
        if end.lost_pod is not None and end.number == attempt_of(child)
        if since is None or (end.start_time is not None and end.start_time >= since)
    )


def record_before(pod: Pod, records: Iterable[Attempt]) -> Attempt | None:
    """Return the record of the pod that this one replaces, the newest of its place."""
    before = attempt_of(pod), index_of(pod), predecessors_of(pod) - 1
    return max((end for end in records if _place_of(end) == before), key=order_of, default=None)


def _place_of(end: Attempt) -> tuple[int, int, int] | None:
    pod = end.lost_pod
    return None if pod is None else (end.number, pod.index, pod.replaced)
