"""Pods and Jobs of gangs that are to be deleted: survivors, leftovers and old attempts."""

from collections import defaultdict
from collections.abc import Iterator

from torchrun_api import names
from torchrun_api.kinds.core import Job, Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import OwnerReference, find_controller
from torchrun_api.kinds.resources import PODS
from torchrun_api.kinds.status import UnfencedWorker
from torchrun_controller.reconcile.gang.fence import has_unrecorded
from torchrun_controller.reconcile.gang.gang import (
    REPLACEMENTS,
    is_complete,
    is_recorded,
    unrecorded_ends,
)
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.model.times import whole_attempts
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of, delete_job, delete_pod

# Seconds for the survivors of a failed gang: their peers are gone, so there is nothing to save.
SURVIVOR_GRACE = 5
KEPT_JOBS = 5


def end_pods(pods: tuple[Pod, ...], grace: int) -> tuple[Delete, ...]:
    """Delete the pods that run and are not being deleted; `grace` in seconds.

    Several pods of one Job are deleted together.
    """
    pods_by_job: defaultdict[OwnerReference | None, list[Pod]] = defaultdict(list)
    for pod in filter(alive, pods):
        pods_by_job[find_controller(pod.metadata.owner_references)].append(pod)
    return tuple(
        delete
        for job, living_pods in pods_by_job.items()
        for delete in _end_pods_of(job, living_pods, grace)
    )


def _end_pods_of(job: OwnerReference | None, pods: list[Pod], grace: int) -> Iterator[Delete]:
    """Delete the pods of one Job, one by one if one is being deleted with a longer grace period.

    A drained pod may be saving a checkpoint, and a second deletion shortens its grace period.
    """
    running = [pod for pod in pods if not pod.metadata.terminating]
    spares_pods = any(_may_outlast(pod, grace) for pod in pods)
    if job is None or spares_pods or len(running) < 2:
        yield from (delete_pod(pod, grace) for pod in running)
        return
    yield Delete(
        kind=PODS,
        namespace=running[0].metadata.namespace,
        name=job.name,
        uid=job.uid,
        grace_seconds=grace,
        collection=True,
    )


def _may_outlast(pod: Pod, grace: int) -> bool:
    """Whether the pod is being deleted, with a longer grace period than `grace` (seconds)."""
    return pod.metadata.terminating and pod.metadata.deletion_grace_period_seconds > grace


def end_survivors(
    job: TorchrunJob, gang: ObservedGang, grace: int = SURVIVOR_GRACE
) -> tuple[Delete, ...]:
    """Delete the pods of the present gang that still run; `grace` in seconds.

    If a user deletes a Job of the gang, the propagation policy of that delete decides on its pods.
    """
    if gang.child_jobs and head_and_workers.find_deleted_job(job, gang):
        return ()
    return end_pods(gang.workers, grace)


def end_stale_pods(job: TorchrunJob, gang: ObservedGang) -> tuple[Delete, ...]:
    """Delete pods of finished gangs that a controller has left running when it died."""
    replaced = replaced_jobs(job, gang)
    older_jobs = [
        child
        for child in gang.child_jobs[:-1]
        if not child.metadata.terminating and child not in replaced
    ]
    attempts = {attempt_of(child) for child in older_jobs}
    workers_jobs = (child for child in gang.worker_jobs if attempt_of(child) in attempts)
    uids = {child.metadata.uid for child in (*older_jobs, *workers_jobs)}
    pods = (
        pod
        for pod in gang.stale_pods
        if any(owner.controller and owner.uid in uids for owner in pod.metadata.owner_references)
    )
    return end_pods(tuple(pods), SURVIVOR_GRACE)


def replaced_jobs(job: TorchrunJob, gang: ObservedGang) -> tuple[Job, ...]:
    """Return Jobs of gangs that were replaced while they ran, left by a controller that died."""
    recorded_ends = whole_attempts(job.status.attempts)
    ends = (*recorded_ends, *(unrecorded_ends(job, gang) if gang.child_jobs else ()))
    reasons = {end.number: end.reason for end in ends}
    older_jobs = (child for child in gang.child_jobs[:-1] if not child.metadata.terminating)
    return tuple(
        child
        for child in older_jobs
        if reasons.get(attempt_of(child)) in REPLACEMENTS and not is_complete(child)
    )


def delete_replaced_jobs(
    job: TorchrunJob, gang: ObservedGang, deletes: tuple[Delete, ...] = ()
) -> tuple[Delete, ...]:
    """Delete Jobs of gangs that were replaced while they ran, unless in `deletes`."""
    uids = {delete.uid for delete in deletes}
    return tuple(
        delete_job(child) for child in replaced_jobs(job, gang) if child.metadata.uid not in uids
    )


def delete_oldest_jobs(gang: ObservedGang) -> tuple[Delete, ...]:
    """Delete the child Jobs of finished attempts, except for the last few."""
    return tuple(delete_job(child) for child in gang.child_jobs[: -KEPT_JOBS + 1])


def end_workers(gang: ObservedGang) -> tuple[Delete, ...]:
    """Delete the workers of a head that has finished."""
    workers = (pod for pod in gang.workers if pod.metadata.labels.role == names.WORKER)
    return end_pods(tuple(workers), SURVIVOR_GRACE)


def delete_head_job(
    job: TorchrunJob, gang: ObservedGang, unfenced: tuple[UnfencedWorker, ...]
) -> tuple[Delete, ...]:
    """Delete the Job of a head whose workers' Job is gone, once its facts are in the status."""
    all_recorded = is_recorded(job, gang) and not has_unrecorded(job, unfenced)
    if head_and_workers.is_whole(gang) or not all_recorded:
        return ()
    return (delete_job(gang.current_job),)


def delete_headless_jobs(gang: ObservedGang) -> tuple[Delete, ...]:
    """Delete the Jobs of workers whose head has no Job."""
    return tuple(delete_job(child) for child in head_and_workers.find_headless_jobs(gang))
