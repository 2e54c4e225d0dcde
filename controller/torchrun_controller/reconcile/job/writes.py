"""From the writes of a decision to a Plan: leftovers, refused writes, the order, live checks."""

from collections.abc import Callable
from typing import TypeAlias

from torchrun_api import names
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.gang import cleanup
from torchrun_controller.reconcile.gang.gang import stale_attempts
from torchrun_controller.reconcile.job import refusals
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.decisions import DecisionWrites
from torchrun_controller.reconcile.job.status import own_part
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import (
    Apply,
    Check,
    Delete,
    Event,
    GangIsGone,
    JobIsThere,
    NoPodIsUnseen,
    Plan,
    PodIsUnchanged,
    StatusWrite,
)
from torchrun_controller.reconcile.model.times import find_end
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of
from torchrun_controller.reconcile.schedulers import groups

Leftovers: TypeAlias = Callable[[Observed, DecisionWrites], tuple[Delete, ...]]


def replaced_jobs(observed: Observed, writes: DecisionWrites) -> tuple[Delete, ...]:
    """Delete the Jobs of gangs that were replaced while they ran."""
    return cleanup.delete_replaced_jobs(observed.job, observed.gang, writes.deletes)


def unused_groups(observed: Observed, writes: DecisionWrites) -> tuple[Delete, ...]:
    """Delete the groups and suspended Jobs of finished gangs, which would reserve capacity."""
    return groups.delete_unused(observed.job, observed.gang, writes.applies)


def headless_jobs(observed: Observed, _: DecisionWrites) -> tuple[Delete, ...]:
    """Delete the Jobs of workers whose head has no Job."""
    return cleanup.delete_headless_jobs(observed.gang)


# What earlier gangs may have left behind, whatever the step decides: a controller may have died
# before it could delete them.
LEFTOVERS: tuple[Leftovers, ...] = (replaced_jobs, unused_groups, headless_jobs)


def build_plan(
    assessment: Assessment,
    writes: DecisionWrites,
    composed: TorchrunJobStatus,
    events: tuple[Event, ...] = (),
    requeue_after: float | None = None,
) -> Plan:
    """Return the Plan of these writes and this status, without the writes that are refused.

    Objects come first, then what is deleted, then the status. Collections come after the status:
    the API server deletes one pod after the other and answers at the end, for a gang of 1,000 after
    many seconds, in which the status would not show the failure.
    """
    observed = assessment.observed
    status = None if composed == own_part(assessment.last_status) else composed
    leftovers = (delete for find in LEFTOVERS for delete in find(observed, writes))
    applies = refusals.accepted_applies(observed.refused, writes.applies)
    deletes = refusals.accepted_deletes(observed.refused, (*writes.deletes, *leftovers))
    status_first = writes.status_before_deletes
    before = () if status_first else tuple(delete for delete in deletes if not delete.collection)
    after = tuple(delete for delete in deletes if delete not in before)
    return Plan(
        checks=find_checks(observed, applies, status),
        writes=(
            *applies,
            *before,
            StatusWrite(status=status, events=events, before_deletes=status_first),
            *after,
        ),
        requeue_after=requeue_after,
    )


def find_checks(
    observed: Observed, applies: tuple[Apply, ...], status: TorchrunJobStatus | None
) -> tuple[Check, ...]:
    """Return what to read before these applies and this status. `status`: None if it stays.

    If a job has started and an object is missing in the caches, the job may be deleted, or the Job
    of its gang may not be in the cache yet, also if the caches show only the pods of a gang. A
    first start, and a restart after an observed failure, need no read.
    """
    created_kinds = {apply.kind for apply in applies if not apply.uid}
    if not created_kinds and status is None:
        return ()
    job, gang, creates_gang = observed.job, observed.gang, JOBS in created_kinds
    checks: list[Check] = []
    if job.spec.elastic is not None and creates_gang:
        checks += [
            PodIsUnchanged(
                namespace=pod.metadata.namespace,
                name=pod.metadata.name,
                resource_version=pod.metadata.resource_version,
            )
            for pod in gang.workers
            if alive(pod) and not pod.spec.node_name
        ]
    namespace, name, uid = job.metadata.namespace, job.metadata.name, job.metadata.uid
    if status is not None and _releases_quota(job.status, status):
        uids = frozenset(pod.metadata.uid for pod in gang.pods)
        checks.append(NoPodIsUnseen(namespace=namespace, job=name, uids=uids))

    older_attempts = stale_attempts(job, gang)
    newest = max([job.status.attempt, *older_attempts])
    shows_gang = any(
        attempt_of(child) >= newest and not child.metadata.terminating for child in gang.child_jobs
    )
    ends_gang = status is not None and _ends_gang(job.status, status)
    if job.status.workers is not None or older_attempts:
        repeats = not shows_gang and (bool(created_kinds) or ends_gang)
    else:
        repeats = job.status.phase == "Syncing" and not created_kinds.isdisjoint((CLAIMS, PODS))
    if repeats:
        checks.append(JobIsThere(namespace=namespace, name=name, uid=uid))
    if repeats and not shows_gang and (creates_gang or ends_gang):
        child_name = names.child_job(name, newest)
        checks.append(GangIsGone(namespace=namespace, name=child_name, owner=uid))
    return tuple(checks)


def _releases_quota(before: TorchrunJobStatus, after: TorchrunJobStatus) -> bool:
    """Whether the new status is the first to report that no pod of a gang runs any more."""
    has_had_gang = before.workers is not None or before.admission is not None
    return (
        has_had_gang and after.phase in ("Suspended", "Preempted") and before.phase != after.phase
    )


def _ends_gang(before: TorchrunJobStatus, after: TorchrunJobStatus) -> bool:
    """Whether the new status records the end of the present attempt, or a failed job."""
    number = before.attempt
    is_new = find_end(before.attempts, number) is None
    return after.phase == "Failed" or (is_new and find_end(after.attempts, number) is not None)
