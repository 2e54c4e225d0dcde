"""The groups of a job's gangs, once they are there: which are of no use any more, what they say."""

from typing import Any

from torchrun_api.core import Job, SchedulingGroup
from torchrun_api.kinds import JOBS, Kind
from torchrun_api.meta import ChildMeta
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS

# Conditions that say, by their status, that a gang is not placed or not admitted.
_REFUSALS = {refusal for one in SCHEDULERS.values() for refusal in one.refusals}


def leftovers(observed: Observed, applies: tuple[Apply, ...]) -> tuple[Delete, ...]:
    """Groups whose gang is over: for its scheduler each may go on asking for room.

    A group stays while a pod of its attempt may run, while its child Job has not ended, and when
    that is about to be made. With Kueue, an older Job that is suspended would be resumed one day.
    """
    needed = {apply.name for apply in applies if apply.kind is JOBS}
    latest = observed.gang.child_jobs[-1:]
    needed |= {child.metadata.name for child in latest if not _ended(child)}
    running = {
        pod.metadata.labels.attempt
        for pod in (*observed.gang.workers, *observed.gang.stale_pods)
        if alive(pod)
    }
    uid = observed.job.metadata.uid
    over: list[tuple[Kind[Any], ChildMeta]] = [
        (group.kind, meta)
        for group in observed.gang.groups
        if (meta := group.object.metadata).controlled_by(uid)
        and meta.name not in needed
        and meta.labels.attempt not in running
        and not meta.terminating
    ]
    older = (child for child in observed.gang.child_jobs[:-1] if child.spec.suspend)
    over += [(JOBS, child.metadata) for child in older if not _ended(child)]
    return tuple(
        Delete(
            kind=kind,
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            # A Job may have ended well meanwhile; a group changes often, and its end tells nothing.
            resource_version=meta.resource_version if kind is JOBS else "",
        )
        for kind, meta in over
    )


def _ended(child: Job) -> bool:
    """Whether the Job makes no pods any more."""
    verdicts = {c.type for c in child.status.conditions if c.status == "True"}
    return child.metadata.terminating or bool(verdicts & {"Complete", "Failed"})


def why_waiting(observed: Observed) -> Reason | None:
    """What the gang's scheduler says against the present gang."""
    child = observed.gang.current_job.metadata
    for group in observed.gang.groups:
        meta = group.object.metadata
        if meta.name == child.name or meta.controlled_by(child.uid):
            why = _verdict(group.object)
            if why is not None:
                return Reason(why.reason, f"{group.kind.kind} {meta.name}: {why.message}")
    return None


def _verdict(group: SchedulingGroup) -> Reason | None:
    said = (*group.status.conditions, *group.status.scheduling_conditions)
    refusals = (c for c in said if c.message and (c.type, c.status) in _REFUSALS)
    return next((Reason("GangUnschedulable", c.message) for c in refusals), None)
