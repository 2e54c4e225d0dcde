"""The status updates that follow from a decision, for jobs and queues.

Updates are written in stages, each after the one before: smaller charges, nominations, preemptions,
admissions, the usage of queues (so that no turn is charged for an admission that failed), and then
the rest. A crash in between grants nothing twice: a charge is removed before the admission that
needs its quota.
"""

from collections.abc import Iterable
from datetime import datetime
from enum import IntEnum
from fractions import Fraction

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.kinds.admission import Admission, QueueAdmission
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.quantity import format_bytes, format_cpu
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueStatus
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.admission.classify import Classification
from torchrun_controller.reconcile.admission.model import (
    Amounts,
    Decisions,
    Grant,
    PendingStatus,
    Preemption,
    QueueSummary,
    QuotaLimits,
    Workload,
)
from torchrun_controller.reconcile.model.conditions import ADMITTED, ConditionUpdate, Reason, update
from torchrun_controller.reconcile.model.messages import count_of
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.requests import GangRequests, admission_of

# Positions up to this one are exact. Those behind may be off by a quarter, so that an admission
# does not write the status of every job that waits.
EXACT = 20

REQUEUED = Reason("Requeued", "Preempted; waiting for admission.")


class Stage(IntEnum):
    """The order of updates; each stage waits for those before it."""

    RELEASE = 0
    NOMINATE = 1
    PREEMPT = 2
    ADMIT = 3
    QUEUES = 4
    REPORT = 5


class JobAdmission(Struct, frozen=True, kw_only=True):
    """The part of a job's status that admission owns."""

    condition: ConditionUpdate | None = None
    admission: Admission | None = None
    position: int | None = None


class StatusUpdate(Struct, frozen=True, kw_only=True):
    """A new status of one job or queue. `rank` orders updates of one stage, lowest first."""

    owner: TorchrunJob | TorchrunQueue
    status: TorchrunJobStatus | TorchrunQueueStatus
    stage: Stage
    rank: int = 0


class _JobDecision(Struct, frozen=True, kw_only=True):
    """What a decision has for one job."""

    grant: Grant | None
    preemption: Preemption | None
    pending: PendingStatus | None


class JobUpdates:
    """The decisions on jobs, by UID."""

    def __init__(self, decisions: Decisions) -> None:
        self._grants = {grant.uid: grant for grant in decisions.grants}
        self._preemptions = {decision.uid: decision for decision in decisions.preemptions}
        self._pending = decisions.pending

    def update(
        self, job: TorchrunJob, classification: Classification, now: datetime
    ) -> StatusUpdate | None:
        """Return the update of this job; None if its status is up to date."""
        uid = job.metadata.uid
        pending = self._pending.get(uid)
        decision = _JobDecision(
            grant=self._grants.get(uid), preemption=self._preemptions.get(uid), pending=pending
        )
        before = job_admission(job)
        after = _apply(decision, job, classification, before, now)
        if after == before or (pending and _is_close(before, after)):
            return None
        rank = after.position or 0
        return StatusUpdate(
            owner=job, status=_status(job, after, now), stage=_stage(before, after), rank=rank
        )


def job_admission(job: TorchrunJob) -> JobAdmission:
    """Return the admission part of the job's status."""
    conditions = (
        ConditionUpdate(c.type, c.status, Reason(c.reason, c.message))
        for c in job.status.conditions
        if c.type == ADMITTED
    )
    return JobAdmission(
        condition=next(conditions, None),
        admission=job.status.admission,
        position=job.status.queue_position,
    )


def _apply(
    decision: _JobDecision,
    job: TorchrunJob,
    classification: Classification,
    before: JobAdmission,
    now: datetime,
) -> JobAdmission:
    """Return the admission part of the job's status after the decision."""
    workload = classification.workload
    if classification.requeued:
        return JobAdmission(condition=ConditionUpdate(ADMITTED, "False", REQUEUED))
    if workload is None or not classification.takes_part:
        return JobAdmission()
    nodes = workload.admitted if decision.grant is None else decision.grant.nodes
    if nodes == 0:
        return before if decision.pending is None else _waiting(decision.pending)
    charge = _charge(before.admission, workload, nodes, now)
    if decision.preemption is not None:
        charge = replace(charge, preempted_for=decision.preemption.for_uid)
        reason = Reason(admission_status.PREEMPTED, decision.preemption.message)
        condition: ConditionUpdate | None = ConditionUpdate(ADMITTED, "False", reason)
    elif admission_status.preempted(job):
        condition = before.condition
    elif classification.outdated and decision.grant is None:
        condition = _outdated_condition(classification.outdated)
    else:
        condition = _admitted_condition(workload, nodes, decision.pending)
    return JobAdmission(condition=condition, admission=charge)


def _waiting(pending: PendingStatus) -> JobAdmission:
    """Return the status of a job that waits and has no charge."""
    return JobAdmission(
        condition=ConditionUpdate(ADMITTED, "False", Reason(pending.reason, pending.message)),
        admission=Admission(nominated=True) if pending.nominated else None,
        position=pending.position or None,
    )


def _charge(
    admission: Admission | None, workload: Workload, nodes: int, now: datetime
) -> Admission:
    """Return the charge for this many nodes: since now if it is the first."""
    admission = admission or Admission(time=workload.since)
    since = now if workload.admitted == 0 else admission.time
    return replace(_add_requests(admission, workload), nodes=nodes, time=since, nominated=False)


def _outdated_condition(excess: str) -> ConditionUpdate:
    message = f"{excess} The current admission is released, and the job waits for a new one."
    return ConditionUpdate(ADMITTED, "False", Reason(admission_status.OUTDATED, message))


def _admitted_condition(
    workload: Workload, nodes: int, pending: PendingStatus | None
) -> ConditionUpdate:
    """Return the condition of an admission; `pending` is why the workload may not grow."""
    message = f"Admitted for {count_of(nodes, 'node')}."
    if pending is not None:
        message = f"Admitted for {nodes} of {workload.nodes} nodes. {pending.message}"
    return ConditionUpdate(ADMITTED, "True", Reason("Admitted", message))


def _add_requests(charge: Admission, workload: Workload) -> Admission:
    """Add what is admitted to an admission that does not record it yet."""
    if charge.queue:
        return charge
    requests = GangRequests(
        nodes=workload.nodes,
        pod=workload.pod,
        gpus=workload.gpus,
        head=workload.head,
        head_gpus=workload.head_gpus,
    )
    record = admission_of(requests, workload.queue)
    return replace(
        charge,
        queue=record.queue,
        requests=record.requests,
        gpus=record.gpus,
        head=record.head,
    )


def _is_close(before: JobAdmission, after: JobAdmission) -> bool:
    """Whether only a position beyond EXACT has changed, by at most a quarter."""
    old, position = before.position, after.position
    if old is None or position is None or position <= EXACT:
        return False
    return replace(after, position=old) == before and abs(old - position) <= position // 4


def _stage(before: JobAdmission, after: JobAdmission) -> Stage:
    old = before.admission or Admission()
    new = after.admission or Admission()
    if new.nodes < old.nodes or (old.nominated and new == Admission()):
        return Stage.RELEASE
    if new.preempted_for and new.preempted_for != old.preempted_for:
        return Stage.PREEMPT
    # The controller never writes a number below 0; one counts as 0.
    if new.nodes > max(old.nodes, 0):
        return Stage.ADMIT
    return Stage.NOMINATE if new.nominated and not old.nominated else Stage.REPORT


def _status(job: TorchrunJob, after: JobAdmission, now: datetime) -> TorchrunJobStatus:
    updates = [after.condition] if after.condition is not None else []
    conditions: tuple[Condition, ...] = update(
        job.status.conditions, updates, job.metadata.generation, now
    )
    return TorchrunJobStatus(
        conditions=conditions, admission=after.admission, queue_position=after.position
    )


def queue_updates(
    queues: Iterable[TorchrunQueue], summaries: tuple[QueueSummary, ...]
) -> list[StatusUpdate]:
    """Return the updates of queues; a queue that no longer takes part loses its `admission`."""
    by_name = {(summary.namespace, summary.name): summary for summary in summaries}
    updates = []
    for queue in queues:
        meta = queue.metadata
        summary = by_name.get((meta.namespace, meta.name))
        after = None if summary is None else _queue_admission(summary)
        if after != queue.status.admission:
            status = TorchrunQueueStatus(admission=after)
            updates.append(StatusUpdate(owner=queue, status=status, stage=Stage.QUEUES))
    return updates


def _queue_admission(summary: QueueSummary) -> QueueAdmission:
    state = summary.round_robin
    return QueueAdmission(
        summary=_usage_text(summary),
        used=_quantities(summary.used),
        free=_quantities(summary.free),
        borrowed=_quantities(summary.borrowed),
        weight=state.weight,
        current=state.current,
    )


def _usage_text(summary: QueueSummary) -> str:
    """Format use and quota of the first resource that the quota limits, GPUs first."""
    for resource, unit in (("gpus", "GPUs"), ("nodes", "nodes"), ("jobs", "jobs")):
        used, free = getattr(summary.used, resource), getattr(summary.free, resource)
        if free is not None:
            own = used - getattr(summary.borrowed, resource) + free
            return f"{used}/{own} {unit}"
    used = summary.used
    return f"{used.gpus} GPUs" if used.gpus else f"{used.nodes} nodes"


def _quantities(amounts: Amounts | QuotaLimits) -> dict[str, int | str]:
    """Return amounts in the units of a quota, without unlimited or unused resources."""
    quantities: dict[str, int | str] = {}
    for resource in ("nodes", "gpus", "jobs"):
        value = getattr(amounts, resource)
        if value or (value == 0 and isinstance(amounts, QuotaLimits)):
            quantities[resource] = value
    cpu, memory = amounts.cpu, amounts.memory
    if cpu or (cpu == 0 and isinstance(amounts, QuotaLimits)):
        quantities["cpu"] = format_cpu(Fraction(cpu, 1000))
    if memory or (memory == 0 and isinstance(amounts, QuotaLimits)):
        quantities["memory"] = format_bytes(Fraction(memory))
    return quantities
