"""The status of a finished job: a better root cause, a late suspension, workers of a head."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api.job import TorchrunJob
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile.gang.failures import choose_cause, find_root_cause
from torchrun_controller.reconcile.gang.state import failure_reason
from torchrun_controller.reconcile.job import refusals
from torchrun_controller.reconcile.job.status import count_beside_head, own_part
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason, update
from torchrun_controller.reconcile.model.observed import ObservedGang, RefusedWrites
from torchrun_controller.reconcile.pods import head_and_workers

ALREADY_FINISHED = Reason(
    "AlreadyFinished", "The job has already finished. spec.suspend has no effect."
)


def compose_finished(
    job: TorchrunJob, gang: ObservedGang, refused: RefusedWrites, now: datetime
) -> TorchrunJobStatus:
    """Return the status of a finished job: with a better root cause, or a late suspension."""
    status = _recount_workers(_refine_failure(job, gang), gang)
    late_suspension = (
        ConditionUpdate("Suspended", "False", ALREADY_FINISHED) if job.spec.suspend else None
    )
    warning = refusals.build_condition(refused, ())
    updates = [condition for condition in (late_suspension, warning) if condition is not None]
    replaced_types = {refusals.CONDITION, *(condition.type for condition in updates)}
    conditions = [
        *(
            c
            for c in status.conditions
            if c.type not in replaced_types and c.reason != ALREADY_FINISHED.reason
        ),
        *update(status.conditions, updates, job.metadata.generation, now),
    ]
    return own_part(replace(status, conditions=tuple(conditions)))


def _recount_workers(status: TorchrunJobStatus, gang: ObservedGang) -> TorchrunJobStatus:
    """Return the status with the workers that still run after their head has succeeded.

    The cache of the pods may be older than that of the Jobs, and lack the head's success.
    """
    counts, gangs = status.workers, gang.child_jobs
    is_settled = (
        status.phase != "Succeeded"
        or counts is None
        or (counts.succeeded > 0 and not counts.running)
    )
    if is_settled or not gangs or not head_and_workers.has_head(gangs[-1]):
        return status
    workers = count_beside_head(gang)
    summary = f"{workers.ready}/{head_and_workers.nodes_of(gangs[-1])} ready"
    return replace(status, workers=workers, workers_status=summary)


def _refine_failure(job: TorchrunJob, gang: ObservedGang) -> TorchrunJobStatus:
    """Return the status with a better root cause, if a pod that ended later shows one."""
    status = job.status
    later = find_root_cause(gang.workers) if status.phase == "Failed" else None
    failure = None if later is None else choose_cause(status.last_failure, later.details)
    if failure is None or failure == status.last_failure:
        return status
    why = failure_reason(failure)
    conditions = tuple(
        replace(c, reason=why.reason, message=why.message) if c.type == "Failed" else c
        for c in status.conditions
    )
    return replace(
        status,
        last_failure=failure,
        reason=why.reason,
        message=why.message,
        conditions=conditions,
    )
