"""The status of a job: phase, conditions, counts and the line for the Reason column."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.meta import Condition
from torchrun_api.queue import TorchrunQueueSpec
from torchrun_api.reliability import QueuePolicy
from torchrun_api.status import TERMINAL, Attempt, TorchrunJobStatus, WorkersStatus
from torchrun_api.unsupported import not_yet_supported
from torchrun_controller.reconcile.gang import fence, gang
from torchrun_controller.reconcile.gang.decision import Decision
from torchrun_controller.reconcile.gang.failures import find_root_cause, precedence
from torchrun_controller.reconcile.job import dependencies, progress, refusals
from torchrun_controller.reconcile.model.conditions import ADMITTED, ConditionUpdate, Reason, update
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.phases import Row, State
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.model.times import seconds_run, sync_start
from torchrun_controller.reconcile.placement import avoid, local
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    count_scheduled,
    count_workers,
)
from torchrun_controller.reconcile.spec.admission_status import REQUESTED
from torchrun_controller.reconcile.spec.reliability import lent_by
from torchrun_controller.reconcile.workspace import claims as job_claims
from torchrun_controller.reconcile.workspace import delivery, reload

KEPT_ATTEMPTS = 5
MOST_NODES = 1024  # an affinity with more names would not help the scheduler
# Conditions that are there only while there is something to warn of, or to ask for.
WARNINGS = frozenset(
    {
        *("NotYetSupported", "StorageShared", "StorageReady", "FullSize"),
        *(names.UP_TO_DATE, refusals.CONDITION, REQUESTED),
    }
)
ALREADY_FINISHED = Reason("AlreadyFinished", "spec.suspend came after the end and changes nothing")

# Findings, and reasons of a waiting gang, that somebody has to do something about.
TROUBLE = frozenset(
    {
        State.GANG_FAILED,
        State.BACKING_OFF,
        State.DEADLINE_EXCEEDED,
        State.SYNC_TIMED_OUT,
        State.QUEUE_MISSING,
        State.SPEC_INVALID,
        State.DEPENDENCY_FAILED,
        State.SCHEDULER_MISSING,
        State.NAME_TAKEN,
        State.REJECTED,
        State.WORKSPACE_REFUSED,
    }
)
TROUBLE_REASONS = frozenset(
    {
        *("Unschedulable", "SchedulerError", "ImagePullFailed", "JobSuspended", "Restarting"),
        *("QuotaExceeded", "PodSecurity", "PodsRefused", "VolumeNotMounted"),
        *(
            "GangUnschedulable",
            "WaitingForFence",
            "ProvisioningFailed",
            "NoStorageClass",
            "ClaimNotFound",
            "ClaimTerminating",
            "OrphanedWorkers",
        ),
        "DependencyNotFound",
    }
)


def compose(observed: Observed, decision: Decision, row: Row, now: datetime) -> TorchrunJobStatus:
    """The status that tells what was decided."""
    job, present = observed.job, observed.job.status
    phase = row.phase or present.phase
    nodes, workers = _workers(observed, decision)
    ended = phase in TERMINAL
    attempts = _attempts(present.attempts, decision.history.ended)
    unfenced = fence.unfenced_workers(observed, now)
    counts = decision.history.counts
    succeeded = gang.find_completed_job(observed.gang)
    if decision.state is State.GANG_SUCCEEDED and succeeded is not None:
        # Another end may have been recorded of the gang before it was known to succeed.
        number = attempt_of(succeeded)
        counts = counts.without(a for a in attempts if a.number >= number)
        attempts = tuple(a for a in attempts if a.number < number)
    return TorchrunJobStatus(
        phase=phase,
        observed_generation=job.metadata.generation,
        reason=decision.why.reason,
        message=decision.why.message,
        conditions=_by_type(
            update(
                present.conditions,
                _conditions(observed, decision, row, nodes or 0),
                job.metadata.generation,
                now,
            )
        ),
        num_nodes=nodes,
        gpus=decision.spec.size.gpus if decision.spec else present.gpus,
        workers=workers,
        workers_status=f"{workers.ready}/{nodes} ready" if workers else "",
        selector=f"{names.JOB_LABEL}={job.metadata.name},{names.COMPONENT_LABEL}={names.WORKER}",
        attempt=decision.attempt,
        restarts=counts.restarts,
        disruptions=counts.disruptions,
        running_seconds=round(seconds_run(present, now))
        if phase != "Running"
        else present.running_seconds,
        attempts=attempts,
        workspace_revision=reload.find_running_revision(job, observed.gang),
        workspace_commit=decision.commit or present.workspace_commit,
        start_time=present.start_time or (now if phase in ("Running", "Succeeded") else None),
        queue_policy=_queue_policy(observed, decision, ended=ended),
        sync_start_time=sync_start(present, phase, now),
        completion_time=now if ended else None,
        unfenced=unfenced,
        worker_nodes=()
        if ended or observed.cluster.nodes is None
        else fence.worker_nodes(job, observed.gang, decision.attempt, unfenced),
        avoided_nodes=avoid.nodes_to_avoid(attempts),
        checkpoint_nodes=local.nodes_with_checkpoints(job, observed.gang)[:MOST_NODES],
        last_failure=decision.history.failure or present.last_failure,
        progress=progress.shown(observed, now, ended=ended),
        dependencies_met=dependencies.met(observed),
    )


def _queue_policy(observed: Observed, decision: Decision, *, ended: bool) -> QueuePolicy | None:
    """What the queue lends, from the first gang on, or from the end of a job that had none."""
    known = observed.job.status.queue_policy
    started = decision.state is State.READY or bool(observed.gang.child_jobs)
    if known is None and (ended or (started and observed.queue is not None)):
        return lent_by(observed.queue)
    return known


def _workers(observed: Observed, decision: Decision) -> tuple[int | None, WorkersStatus | None]:
    """Nodes of the gang, or of the one to come, and its workers; the next one's if it is made."""
    present = observed.job.status
    if decision.state is State.READY:
        assert decision.spec is not None
        nodes = decision.spec.size.nodes
        return nodes, count_workers((), nodes)
    if observed.gang.child_jobs:
        child = gang.find_completed_job(observed.gang) or observed.gang.current_job
        nodes = head_and_workers.nodes_of(child)
        if decision.state is State.GANG_SUCCEEDED:
            if head_and_workers.has_head(child):
                return nodes, _beside_head(observed)
            # The Job's word: what is known of its pods may be older, and is not told any more.
            return nodes, WorkersStatus(succeeded=nodes)
        return nodes, count_workers(observed.gang.workers, nodes)
    # Counts of zero remember that there was a gang: the next one has another number.
    idle = None if present.workers is None else WorkersStatus()
    return (decision.spec.size.nodes if decision.spec else present.num_nodes), idle


def _beside_head(observed: Observed) -> WorkersStatus:
    """Once the head has succeeded; a worker that is gone by then is not waited for.

    One that was ended with the head counts while it runs: neither its end nor how long it is seen
    after that says anything.
    """
    told = (p for p in observed.gang.workers if alive(p) or not p.metadata.terminating)
    return count_workers(tuple(told), 0)


def _attempts(known: tuple[Attempt, ...], ended: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    """The last gangs that ended, each as it was first recorded."""
    by_number = {attempt.number: attempt for attempt in (*ended, *known)}
    return tuple(by_number[number] for number in sorted(by_number))[-KEPT_ATTEMPTS:]


def own(status: TorchrunJobStatus) -> TorchrunJobStatus:
    """The part of a status that is reconcile's to write: not what admission says of the job.

    Its conditions are ordered by type: the API server keeps no order of a map list.
    """
    conditions = (c for c in status.conditions if c.type != ADMITTED)
    return replace(
        status, conditions=_by_type(tuple(conditions)), admission=None, queue_position=None
    )


def _by_type(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    return tuple(sorted(conditions, key=lambda condition: condition.type))


def _conditions(
    observed: Observed, decision: Decision, row: Row, nodes: int
) -> list[ConditionUpdate]:
    """What is claimed now, over what was claimed before and is not contradicted."""
    claims = {
        c.type: ConditionUpdate(c.type, c.status, Reason(c.reason, c.message))
        for c in observed.job.status.conditions
        if c.type not in WARNINGS and c.type != ADMITTED
    }
    claims.update((update.type, update) for update in decision.conditions)
    made = decision.state is State.READY
    if observed.gang.child_jobs or made:
        placed = _placed(observed, decision, nodes)
        why = _why_placed(decision, placed, nodes)
        _claim(claims, "Scheduled", holds=placed == nodes, why=why)
    if row.phase in TERMINAL or row.phase == "Suspended":
        _claim(claims, "Running", holds=False, why=Reason("NotRunning", "no worker runs"))
    if "Suspended" in claims and row.condition != "Suspended":
        _claim(
            claims, "Suspended", holds=False, why=Reason("NotSuspended", "spec.suspend is false")
        )
    claims[row.condition] = ConditionUpdate(row.condition, row.status, decision.why)
    refused = refusals.condition(observed, decision.writes.applies)
    if refused is not None:
        claims[refused.type] = refused
    unshared = job_claims.check_access_modes(
        delivery.mounted_claims(observed.job, observed.workspace), nodes
    )
    if unshared is not None:
        _claim(claims, "StorageShared", holds=False, why=unshared)
    template = observed.queue.spec if observed.queue else TorchrunQueueSpec()
    fields = not_yet_supported(observed.job.spec, template)
    if fields:
        message = "accepted, but not acted on: " + "; ".join(fields)
        _claim(claims, "NotYetSupported", holds=True, why=Reason("FieldsNotHonoured", message))
    return list(claims.values())


def _placed(observed: Observed, decision: Decision, nodes: int) -> int:
    """Workers with a node."""
    match decision.state:
        case State.READY | State.BACKING_OFF:
            return 0
        case State.GANG_SUCCEEDED:
            return nodes  # whatever the cache of pods, which may lag behind that of Jobs
        case _:
            return count_scheduled(observed.gang.workers)


def _why_placed(decision: Decision, placed: int, nodes: int) -> Reason:
    """How many workers have a node, and what keeps the others from one where that is known."""
    if decision.state is State.BACKING_OFF:  # the gang is over: its pods wait for nothing
        return decision.why
    if placed == nodes:
        return Reason("WorkersScheduled", f"{placed} of {nodes} workers have a node")
    if decision.state is State.GANG_STARTING and decision.why.reason in TROUBLE_REASONS:
        return decision.why
    return Reason("WorkersWaiting", f"{placed} of {nodes} workers have a node")


def _claim(claims: dict[str, ConditionUpdate], kind: str, *, holds: bool, why: Reason) -> None:
    claims[kind] = ConditionUpdate(kind, "True" if holds else "False", why)


def after_the_end(observed: Observed, now: datetime) -> TorchrunJobStatus:
    """What is still told of a job that is over: a better root cause, a pause that is too late."""
    refined = _recounted(_refined(observed), observed)
    late = (
        ConditionUpdate("Suspended", "False", ALREADY_FINISHED)
        if observed.job.spec.suspend
        else None
    )
    claims = [claim for claim in (late, refusals.condition(observed, ())) if claim is not None]
    claimed = {refusals.CONDITION, *(claim.type for claim in claims)}
    conditions = [
        *(
            c
            for c in refined.conditions
            if c.type not in claimed and c.reason != ALREADY_FINISHED.reason
        ),
        *update(refined.conditions, claims, observed.job.metadata.generation, now),
    ]
    return own(replace(refined, conditions=tuple(conditions)))


def _recounted(present: TorchrunJobStatus, observed: Observed) -> TorchrunJobStatus:
    """Workers may end later than the head that they go with."""
    known, gangs = present.workers, observed.gang.child_jobs
    over = present.phase != "Succeeded" or known is None or not known.running
    if over or not gangs or not head_and_workers.has_head(gangs[-1]):
        return present
    workers = _beside_head(observed)
    told = f"{workers.ready}/{head_and_workers.nodes_of(gangs[-1])} ready"
    return replace(present, workers=workers, workers_status=told)


def _refined(observed: Observed) -> TorchrunJobStatus:
    """A failed job learns a better root cause from pods that end after the first one did."""
    present = observed.job.status
    found = find_root_cause(observed.gang.workers) if present.phase == "Failed" else None
    known = present.last_failure
    if found is None or (known is not None and precedence(known) <= precedence(found.details)):
        return present
    why = gang.failure_reason(found.details)
    conditions = tuple(
        replace(c, reason=why.reason, message=why.message) if c.type == "Failed" else c
        for c in present.conditions
    )
    return replace(
        present,
        last_failure=found.details,
        reason=why.reason,
        message=why.message,
        conditions=conditions,
    )


def events(
    before: TorchrunJobStatus, composed: TorchrunJobStatus, decision: Decision, row: Row
) -> tuple[Event, ...]:
    """One event at each change of phase or reason, and one where a warning is new or another.

    Counts within a message may change with every look of the scheduler: they make no event.
    """
    return (*_change(before, decision, row), *_new_warnings(before, composed))


def _new_warnings(before: TorchrunJobStatus, composed: TorchrunJobStatus) -> list[Event]:
    told = {"StorageShared", "StorageReady", names.UP_TO_DATE, refusals.CONDITION}
    known = {(condition.type, condition.reason) for condition in before.conditions}
    return [
        Event("Warning", condition.reason, condition.message)
        for condition in composed.conditions
        if condition.type in told and condition.status == "False"
        if (condition.type, condition.reason) not in known
    ]


def _change(before: TorchrunJobStatus, decision: Decision, row: Row) -> list[Event]:
    why, state = decision.why, decision.state
    if before.phase == row.phase and before.reason == why.reason:
        return []
    trouble = state in TROUBLE or why.reason in TROUBLE_REASONS
    changed = Event("Warning" if trouble else "Normal", why.reason, why.message)
    return [changed] if decision.warning is None else [changed, decision.warning]
