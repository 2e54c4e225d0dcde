"""The status of a job: phase, conditions, counts, and the message of the Reason column."""

from collections.abc import Mapping

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.queue import TorchrunQueue, TorchrunQueueSpec
from torchrun_api.kinds.reliability import QueuePolicy
from torchrun_api.kinds.status import TERMINAL, TorchrunJobStatus, WorkersStatus
from torchrun_api.kinds.unsupported import not_yet_supported
from torchrun_controller.reconcile.gang import checkpoints, fence, headway
from torchrun_controller.reconcile.gang.elastic import FULL_SIZE
from torchrun_controller.reconcile.gang.gang import accepted_generation, find_completed_job
from torchrun_controller.reconcile.gang.restarts import AWAITING_EDIT
from torchrun_controller.reconcile.job import dependencies, network, progress, refusals
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.decisions import Decision
from torchrun_controller.reconcile.model.conditions import (
    ADMITTED,
    BLOCKED_REASONS,
    ConditionUpdate,
    Reason,
    find_condition,
    update,
)
from torchrun_controller.reconcile.model.messages import pods_are, sentence
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang
from torchrun_controller.reconcile.model.phases import ROWS, Row, State
from torchrun_controller.reconcile.model.times import (
    keep_last,
    seconds_run,
    sync_start,
    whole_attempts,
)
from torchrun_controller.reconcile.placement import nodes_to_avoid, nodes_with_checkpoints
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    count_scheduled,
    count_workers,
)
from torchrun_controller.reconcile.spec.admission_status import REQUESTED
from torchrun_controller.reconcile.spec.reliability import queue_policy
from torchrun_controller.reconcile.workspace import claims as job_claims
from torchrun_controller.reconcile.workspace import delivery, reload

# The back-off counts the early failures among them: it reaches its cap after seven.
KEPT_ATTEMPTS = 10
MOST_HOSTS = 1024  # more names in an affinity would not help the scheduler
DISTRIBUTED, SCHEDULED = "Distributed", "Scheduled"
# Reasons of a waiting gang that need an action of a user or an administrator.
TROUBLE_REASONS = BLOCKED_REASONS | {
    *("Unschedulable", "GangUnschedulable", "QuotaExceeded", "JobSuspended", "Restarting"),
    *("WaitingForFence", "ClaimTerminating", "SetupPodLost", AWAITING_EDIT),
}
# Conditions that exist only while there is something to warn of or to request.
WARNINGS = frozenset(
    {
        *("NotYetSupported", "StorageShared", "StorageReady"),
        *(names.UP_TO_DATE, refusals.CONDITION, REQUESTED, FULL_SIZE, DISTRIBUTED),
        *(headway.RESUMED, network.CONDITION),
    }
)
TRAINS_ALONE = Reason(
    "NotDistributed",
    "The command has imported torch, but no process has a WORLD_SIZE above 1 or a process group, so"
    " each one trains alone. If that stays so, the job fails at its end. Write the command as"
    " python train.py, or start torchrun in the script. launcher: none accepts the command as it"
    " is.",
)
# Other managers may add conditions of their own types. Only these are written, and so owned.
OWN_CONDITIONS = WARNINGS | {*(row.condition for row in ROWS.values()), SCHEDULED}
QUEUE_FOUND = ConditionUpdate("QueueReady", "True", Reason("QueueFound", "The queue exists."))
NOT_SCHEDULED = Reason("NotScheduled", "The job has no gang.")
NOT_RUNNING = Reason("NotRunning", "No pod is running.")
NOT_SUSPENDED = Reason("NotSuspended", "spec.suspend is false.")


def compose(assessment: Assessment, decision: Decision) -> TorchrunJobStatus:
    """Return the status that explains the decision."""
    observed, now, unfenced = assessment.observed, assessment.now, assessment.unfenced
    job, last_status, row = observed.job, observed.job.status, ROWS[decision.state]
    phase = row.phase or last_status.phase
    nodes, workers = _workers(job, observed.gang, decision)
    is_terminal = phase in TERMINAL
    ranks_run = decision.state is State.GANG_RUNNING and observed.gang.restarts.awaits_edit is None
    attempts = keep_last(last_status.attempts, decision.history.ends, KEPT_ATTEMPTS)
    counts = decision.history.counts
    networks = network.choose_network(last_status, observed.gang, decision.attempt)
    completed_job = find_completed_job(observed.gang)
    if decision.state is State.GANG_SUCCEEDED and completed_job is not None:
        # Another end of the gang may have been recorded before its success was observed.
        number = attempt_of(completed_job)
        wrong_ends = [end for end in whole_attempts(attempts) if end.number >= number]
        counts = counts.without(wrong_ends)
        attempts = tuple(end for end in attempts if end not in wrong_ends)
    start = headway.ranks_start(last_status, observed.gang, attempts)
    last_report = progress.choose_progress(
        last_status.progress,
        observed.gang.progress,
        now,
        ranks_start=start,
        has_ended=is_terminal,
    )
    behind = None
    if ranks_run:
        behind = headway.check_resumption(last_status, observed.gang, last_report, start)
    has_run = phase == "Running" or is_terminal
    slow = network.find_slow(networks, observed.gang) if has_run else None
    composed = TorchrunJobStatus(
        phase=phase,
        observed_generation=job.metadata.generation,
        reason=decision.why.reason,
        message=decision.why.message,
        conditions=_by_type(
            update(
                last_status.conditions,
                _conditions(observed, decision, row, nodes or 0, behind, slow),
                job.metadata.generation,
                now,
            )
        ),
        num_nodes=nodes,
        gpus=decision.spec.size.gpus if decision.spec else last_status.gpus,
        workers=workers,
        workers_status=f"{workers.ready}/{nodes} ready" if workers else "",
        selector=f"{names.JOB_LABEL}={job.metadata.name},{names.COMPONENT_LABEL}={names.WORKER}",
        attempt=decision.attempt,
        restarts=counts.restarts,
        restarts_in_place=decision.history.restarts_in_place,
        disruptions=counts.disruptions,
        running_seconds=round(seconds_run(last_status, assessment.ran_until))
        if phase != "Running"
        else last_status.running_seconds,
        attempts=attempts,
        workspace_revision=reload.find_running_revision(job, observed.gang),
        workspace_commit=decision.commit or last_status.workspace_commit,
        start_time=last_status.start_time or (now if phase in ("Running", "Succeeded") else None),
        queue_policy=_queue_policy(
            job, observed.queue, observed.gang, decision, is_terminal=is_terminal
        ),
        accepted_generation=job.metadata.generation
        if decision.state is State.READY
        else accepted_generation(job, observed.gang),
        sync_start_time=sync_start(last_status, phase, now),
        completion_time=now if is_terminal else None,
        unfenced=unfenced,
        worker_nodes=()
        if is_terminal
        else fence.worker_nodes(job, observed.gang, observed.cluster, decision.attempt, unfenced),
        avoided_nodes=nodes_to_avoid(attempts),
        checkpoint_nodes=nodes_with_checkpoints(job, observed.gang)[:MOST_HOSTS],
        last_failure=decision.history.failure or last_status.last_failure,
        progress=last_report,
        estimated_remaining_seconds=progress.estimate_remaining(last_report, start)
        if ranks_run
        else None,
        network=networks,
        dependencies_met=dependencies.find_met(job, observed.parents),
    )
    is_running = decision.state is State.GANG_RUNNING
    return checkpoints.record(composed, last_status, observed.gang, now, is_running=is_running)


def _queue_policy(
    job: TorchrunJob,
    queue: TorchrunQueue | None,
    gang: ObservedGang,
    decision: Decision,
    *,
    is_terminal: bool,
) -> QueuePolicy | None:
    """Return the policy of the queue, recorded with the first gang, or at the end of the job."""
    policy = job.status.queue_policy
    has_gang = decision.state is State.READY or bool(gang.child_jobs)
    if policy is None and (is_terminal or (has_gang and queue is not None)):
        return queue_policy(queue)
    return policy


def _workers(
    job: TorchrunJob, gang: ObservedGang, decision: Decision
) -> tuple[int | None, WorkersStatus | None]:
    """Return nodes and worker counts: of the gang that is created now, else of the present one."""
    if decision.state is State.READY:
        assert decision.spec is not None
        nodes = decision.spec.size.nodes
        return nodes, count_workers((), nodes)
    if gang.child_jobs:
        child = find_completed_job(gang) or gang.current_job
        nodes = head_and_workers.nodes_of(child)
        if decision.state is State.GANG_SUCCEEDED:
            if head_and_workers.has_head(child):
                return nodes, count_beside_head(gang)
            # The Job decides: the cache of its pods may be older.
            return nodes, WorkersStatus(succeeded=nodes)
        return nodes, count_workers(gang.workers, nodes)
    # Counts of zero record that there was a gang: the next attempt has another number.
    no_workers = None if job.status.workers is None else WorkersStatus()
    return (decision.spec.size.nodes if decision.spec else job.status.num_nodes), no_workers


def count_beside_head(gang: ObservedGang) -> WorkersStatus:
    """Count the workers of a head that has succeeded; nothing waits for missing ones.

    A worker that was deleted together with the head counts as running until its pod terminates.
    """
    pods = tuple(p for p in gang.workers if alive(p) or not p.metadata.terminating)
    return count_workers(pods, 0)


def own_part(status: TorchrunJobStatus) -> TorchrunJobStatus:
    """Return the part of a status that reconcile writes, without that of admission.

    Conditions are ordered by type: the API server keeps no order of a map list.
    """
    conditions = (c for c in status.conditions if c.type in OWN_CONDITIONS)
    return replace(
        status, conditions=_by_type(tuple(conditions)), admission=None, queue_position=None
    )


def _by_type(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    return tuple(sorted(conditions, key=lambda condition: condition.type))


def _conditions(
    observed: Observed,
    decision: Decision,
    row: Row,
    nodes: int,
    behind: Reason | None,
    slow: Reason | None,
) -> list[ConditionUpdate]:
    """Return the conditions of the decision over those of the status; `nodes` is the gang's size.

    `behind` is why the ranks should have resumed at a later step, `slow` why the network is slow.
    Of two with the same type, the later one wins.
    """
    previous = _kept_conditions(observed, row)
    updates = {update.type: update for update in (*previous, *decision.conditions)}
    if observed.queue is not None:
        updates["QueueReady"] = QUEUE_FOUND
    if observed.gang.child_jobs or decision.state is State.READY:
        updates[SCHEDULED] = _build_scheduled(observed.gang, decision, nodes, updates)
    elif SCHEDULED in updates and row.phase is not None and row.phase not in TERMINAL:
        updates[SCHEDULED] = _build(SCHEDULED, holds=False, why=NOT_SCHEDULED)
    _set_phase_conditions(updates, observed.job.status.conditions, decision, row)
    for warning in _warnings(observed, decision, nodes):
        updates[warning.type] = warning
    if behind is not None:
        updates[headway.RESUMED] = _build(headway.RESUMED, holds=False, why=behind)
    if slow is not None:
        updates[network.CONDITION] = _build(network.CONDITION, holds=True, why=slow)
    return list(updates.values())


def _kept_conditions(observed: Observed, row: Row) -> list[ConditionUpdate]:
    """Return the conditions that stay if nothing sets them."""
    return [
        ConditionUpdate(c.type, c.status, Reason(c.reason, c.message))
        for c in observed.job.status.conditions
        if _is_kept(c, observed, row)
    ]


def _is_kept(condition: Condition, observed: Observed, row: Row) -> bool:
    """Whether a condition stays: no warning, not of another manager, and no wait that is over.

    The last dependency may be removed from the spec. A suspended job waits for nothing: its sync
    and setup pods are gone. Serve pods stay, or the status alone records that one is to follow.
    """
    if condition.type in WARNINGS or condition.type not in OWN_CONDITIONS:
        return False
    has_waited = row.phase == "Suspended" and condition.status == "False"
    if condition.type == dependencies.CONDITION:
        return bool(observed.job.spec.depends_on) and not has_waited
    if condition.type == "WorkspaceReady" and has_waited:
        return delivery.is_served(observed.job, observed.workspace)
    return True


def _set_phase_conditions(
    updates: dict[str, ConditionUpdate],
    conditions: tuple[Condition, ...],
    decision: Decision,
    row: Row,
) -> None:
    """Set the condition of the phase, and reset those of other phases.

    Running refers to conditions of `updates`, or to Admitted in `conditions`, which have the same
    message.
    """
    if row.phase in TERMINAL or row.phase == "Suspended":
        updates["Running"] = _build("Running", holds=False, why=NOT_RUNNING)
    elif row.phase is not None:
        # The reason of an earlier wait is outdated. The row's condition has the present one.
        updates.pop("Running", None)
    if "Suspended" in updates:
        updates["Suspended"] = _build("Suspended", holds=False, why=NOT_SUSPENDED)
    why = decision.why
    if row.condition == "Running":
        why = _refer(why, updates, conditions)
    updates[row.condition] = ConditionUpdate(row.condition, row.status, why)


def _warnings(observed: Observed, decision: Decision, nodes: int) -> list[ConditionUpdate]:
    """Return warnings: of refused writes, unsupported fields, a PVC for one machine, lone ranks."""
    job, warnings = observed.job, []
    refused = refusals.build_condition(observed.refused, decision.writes.applies)
    if refused is not None:
        warnings.append(refused)
    mounted_claims = delivery.mounted_claims(job, observed.gang, observed.workspace)
    access_problem = job_claims.check_access_modes(mounted_claims, nodes)
    if access_problem is not None:
        warnings.append(_build("StorageShared", holds=False, why=access_problem))
    template = observed.queue.spec if observed.queue else TorchrunQueueSpec()
    fields = not_yet_supported(job.spec, template)
    if fields:
        why = Reason("FieldsNotHonored", " ".join(sentence(field) for field in fields))
        warnings.append(_build("NotYetSupported", holds=True, why=why))
    if decision.state is State.GANG_RUNNING and observed.gang.restarts.alone:
        warnings.append(_build(DISTRIBUTED, holds=False, why=TRAINS_ALONE))
    return warnings


def _build(kind: str, *, holds: bool, why: Reason) -> ConditionUpdate:
    return ConditionUpdate(kind, "True" if holds else "False", why)


def _build_scheduled(
    gang: ObservedGang, decision: Decision, nodes: int, updates: Mapping[str, ConditionUpdate]
) -> ConditionUpdate:
    """Return the condition Scheduled of a gang of `nodes` pods; `updates` are the others."""
    scheduled_count = _scheduled_count(gang, decision, nodes)
    why = _without_size(_why_placed(decision, scheduled_count, nodes), updates)
    return ConditionUpdate(SCHEDULED, "True" if scheduled_count == nodes else "False", why)


def _scheduled_count(gang: ObservedGang, decision: Decision, nodes: int) -> int:
    """Return the number of workers that have a machine."""
    match decision.state:
        case State.READY | State.BACKING_OFF:
            return 0
        case State.GANG_SUCCEEDED:
            return nodes  # the cache of pods may lag behind that of Jobs
        case _:
            return count_scheduled(gang.workers)


def _why_placed(decision: Decision, scheduled_count: int, nodes: int) -> Reason:
    """Return how many workers have a machine, and why the others have none, if known."""
    if decision.state is State.BACKING_OFF:  # the gang has ended: its pods need no machine
        return Reason(decision.why.reason, "The pods are created again after the back-off.")
    if scheduled_count == nodes:
        return Reason("WorkersScheduled", f"{pods_are(scheduled_count, nodes)} scheduled.")
    why = decision.why
    has_trouble = why.reason in TROUBLE_REASONS and why.reason != "Restarting"
    if decision.state is State.GANG_STARTING and has_trouble:
        return why
    return Reason("WorkersWaiting", f"{pods_are(scheduled_count, nodes)} scheduled.")


def _without_size(why: Reason, updates: Mapping[str, ConditionUpdate]) -> Reason:
    """Return the reason without the message of the condition FullSize, which has it in full."""
    size = updates.get(FULL_SIZE)
    text = why.message.removesuffix(f" {size.why.message}") if size is not None else why.message
    return Reason(why.reason, text)


def _refer(
    why: Reason, updates: Mapping[str, ConditionUpdate], conditions: tuple[Condition, ...]
) -> Reason:
    """Return the reason for Running, without what other conditions of the job have in full."""
    scheduled_update, size_update = updates.get(SCHEDULED), updates.get(FULL_SIZE)
    admission = find_condition(conditions, ADMITTED)
    if size_update is not None and _contains(size_update.why, why):
        return Reason(why.reason, "All pods are running. See the condition FullSize.")
    if admission is not None and admission.status == "False" and admission.message == why.message:
        return Reason(why.reason, "The job is not admitted. See the condition Admitted.")
    own_why = _without_size(why, updates)
    if scheduled_update is None:
        return own_why
    if scheduled_update.why == own_why:
        return Reason(why.reason, "Not all pods are scheduled. See the condition Scheduled.")
    # How many pods have a machine is followed by why the others do not run.
    return Reason(why.reason, own_why.message.removeprefix(f"{scheduled_update.why.message} "))


def _contains(whole: Reason, part: Reason) -> bool:
    """Whether the message of `whole` starts with that of `part`, and the reasons are equal."""
    return whole.reason == part.reason and whole.message.startswith(part.message)
