"""The next step of one job: the first of STEPS that applies decides."""

from collections.abc import Callable
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.core import Pod
from torchrun_api.status import PHASES, TERMINAL, Phase, TorchrunJobStatus
from torchrun_controller.reconcile.gang import cleanup, fence
from torchrun_controller.reconcile.gang.decision import Decision, soonest
from torchrun_controller.reconcile.job import events, finished, progress, refusals, status
from torchrun_controller.reconcile.job.assess import Assessment, assess
from torchrun_controller.reconcile.job.endings import (
    clean_up,
    deadline_exceeded,
    preempted,
    suspended,
)
from torchrun_controller.reconcile.job.next_attempt import (
    checkpoints_terminating,
    create_gang,
    dependencies_not_met,
    dependency_failed,
    gang_refused,
    job_invalid,
    nodes_not_read,
    not_admitted,
    queue_missing,
    scheduler_missing,
    spec_invalid,
    unfenced_not_recorded,
    workspace_not_ready,
)
from torchrun_controller.reconcile.job.running import (
    backing_off,
    gang_deleted,
    gang_exists,
    gang_failed,
    gang_succeeded,
    service_refused,
)
from torchrun_controller.reconcile.job.unused_admission import (
    start_timed_out,
    with_returned_admission,
)
from torchrun_controller.reconcile.model.conditions import linked
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import (
    Defaults,
    Observed,
    ObservedGang,
    ObservedWorkspace,
)
from torchrun_controller.reconcile.model.phases import ROWS
from torchrun_controller.reconcile.model.plan import Event, Plan
from torchrun_controller.reconcile.model.times import deadline_left, sync_left, without_future_end
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.schedulers import groups
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability, resolve_reliability

_KNOWN = (None, *PHASES)


class Step(Struct, frozen=True):
    """One rule. `decide` returns None if it does not apply.

    `leads_to` are the phases that its decisions may set.
    """

    decide: Callable[[Assessment], Decision | None]
    leads_to: tuple[Phase, ...]


STEPS: tuple[Step, ...] = (
    # What ends a job comes first.
    Step(gang_succeeded, ("Succeeded",)),
    Step(deadline_exceeded, ("TimedOut",)),
    Step(gang_deleted, ("Failed",)),
    # What the user or the queue asks for. While pods end, a pause leaves the phase as it is.
    Step(suspended, ("Suspended",)),
    Step(preempted, ("Preempted",)),
    Step(start_timed_out, ("Queued",)),
    # A gang that exists, or existed: it failed, or is kept going.
    Step(gang_failed, ("Failed",)),
    Step(backing_off, ("Queued",)),
    Step(service_refused, ("Pending",)),
    Step(gang_exists, ("Queued", "Running", "Preempted")),
    # What is missing for the next attempt, cheapest first.
    Step(job_invalid, ("Pending",)),
    Step(queue_missing, ("Pending",)),
    Step(spec_invalid, ("Pending",)),
    Step(dependency_failed, ("Failed", "Pending")),
    Step(scheduler_missing, ("Pending",)),
    Step(workspace_not_ready, ("Syncing", "Failed", "Pending")),
    Step(dependencies_not_met, ("Queued",)),
    Step(checkpoints_terminating, ("Queued",)),
    Step(gang_refused, ("Pending",)),
    Step(not_admitted, ("Queued", "Preempted")),
    Step(nodes_not_read, ("Queued",)),
    Step(unfenced_not_recorded, ("Queued",)),
    Step(create_gang, ("Queued",)),
)


def reconcile(observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """Return the next writes for one job and the status that explains them.

    `now` is in UTC with whole seconds, as the API keeps times. The garbage collector removes what a
    deleted job owns. A job that is over keeps its phase: its pods end, and it expires.
    """
    if observed.job.metadata.terminating:
        return Plan()
    unreadable = describe_unreadable(observed)
    if unreadable:
        return Plan(events=(Event("Warning", "Unreadable", unreadable),))
    if observed.job.status.phase in TERMINAL:
        return plan_finished(observed, now)
    assessment = assess(observed, now, defaults)
    return plan(assessment, first_decision(assessment), observed.job.status)


def describe_unreadable(observed: Observed) -> str:
    """Return why a job is left alone, with its pods and its status; "" for all others.

    A newer version may have written it. A status that this version wrote would remove what it
    cannot read. A spec that it cannot read is reported in the status as long as nothing runs.
    """
    job = observed.job
    problem = f"status.phase is {job.status.phase}" if job.status.phase not in _KNOWN else ""
    has_run = job.status.workers is not None or bool(observed.gang.child_jobs)
    if job.incomplete or (job.invalid and has_run):
        problem = job.invalid
    if not problem:
        return ""
    return (
        f"This version of the controller cannot read the job: {sentence(problem)} It leaves job"
        " and pods as they are. Upgrade the controller, or correct the field."
    )


def first_decision(assessment: Assessment) -> Decision:
    """The decision of the first step that applies; the last one always does."""
    decisions = (step.decide(assessment) for step in STEPS)
    return next(decision for decision in decisions if decision is not None)


def plan(assessment: Assessment, decision: Decision, last_status: TorchrunJobStatus) -> Plan:
    """Return the writes of a decision, without refused ones, and when to reconcile again.

    `last_status` is the status as the API has it, with times that may be ahead of `assessment.now`.
    """
    observed, now, reliability = assessment.observed, assessment.now, assessment.reliability
    decision = with_returned_admission(assessment, decision)
    decision = replace(decision, why=linked(decision.why, assessment.defaults.docs_url))
    writes = decision.writes
    composed = status.compose(
        observed,
        decision,
        ROWS[decision.state],
        assessment.unfenced,
        now,
        ran_until=assessment.ran_until,
    )
    deletes = (
        *writes.deletes,
        *cleanup.delete_resized_jobs(observed.job, observed.gang, writes.deletes),
        *groups.delete_unused(observed.job, observed.gang, writes.applies),
        *cleanup.delete_headless_jobs(observed.gang),
    )
    watched_pods = _watched_pods(observed.gang, observed.workspace)
    return Plan(
        applies=refusals.accepted_applies(observed.refused, writes.applies),
        deletes=refusals.accepted_deletes(observed.refused, deletes),
        status_before_deletes=writes.status_before_deletes,
        status=None if composed == status.own_part(last_status) else composed,
        events=events.list_events(last_status, composed, decision),
        requeue_after=soonest(
            writes.requeue_after,
            nodes.next_loss(observed.cluster.nodes, watched_pods, now),
            fence.next_release(
                observed.gang, observed.cluster.nodes, reliability, assessment.unfenced, now
            ),
            sync_left(composed, reliability.sync_timeout, now),
            deadline_left(composed, reliability.deadline, now),
            _time_to_live(composed, reliability),
            progress.next_report(composed.progress, observed.gang.progress, now),
        ),
    )


def plan_finished(observed: Observed, now: datetime) -> Plan:
    """Delete what a finished job leaves running, and the job after its time to live.

    A job whose end nothing waits for keeps its completionTime, also if it is in the future.
    """
    reliability = resolve_reliability(observed.job, observed.queue)
    past_job = without_future_end(observed.job, now)
    deletes, seconds_left = clean_up(replace(observed, job=past_job), reliability, now)
    job = observed.job if seconds_left is None else past_job
    deletes += (
        *cleanup.delete_resized_jobs(observed.job, observed.gang),
        *groups.delete_unused(observed.job, observed.gang, ()),
    )
    deletes += cleanup.delete_headless_jobs(observed.gang)
    composed = finished.compose_finished(job, observed.gang, observed.refused, now)
    return Plan(
        deletes=refusals.accepted_deletes(observed.refused, deletes),
        status=None if composed == status.own_part(observed.job.status) else composed,
        requeue_after=seconds_left,
    )


def _watched_pods(gang: ObservedGang, workspace: ObservedWorkspace) -> tuple[Pod, ...]:
    """Return the pods for which the loss of their node makes a difference."""
    helper_pods = filter(alive, (*workspace.sync_pods, *workspace.setup_pods))
    return (*gang.workers, *gang.stale_pods, *helper_pods)


def _time_to_live(composed: TorchrunJobStatus, reliability: ResolvedReliability) -> float | None:
    if composed.phase not in TERMINAL or reliability.time_to_live is None:
        return None
    return max(reliability.time_to_live.total_seconds(), 1.0)
