"""The next step of one job: the first of STEPS that applies decides."""

from collections.abc import Callable
from datetime import datetime

from msgspec import Struct

from torchrun_api.kinds.status import TERMINAL, Phase
from torchrun_controller.reconcile.gang import checkpoints, fence
from torchrun_controller.reconcile.job import (
    endings,
    events,
    next_attempt,
    progress,
    running,
    status,
)
from torchrun_controller.reconcile.job.assess import Assessment, assess
from torchrun_controller.reconcile.job.decisions import Decision
from torchrun_controller.reconcile.job.finished import job_finished
from torchrun_controller.reconcile.job.writes import build_plan
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Event, Plan, StatusWrite
from torchrun_controller.reconcile.model.times import deadline_left, soonest, sync_left
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import alive


def job_deleted(assessment: Assessment) -> Plan | None:
    """Leave a job that is being deleted to the garbage collector, with all that it owns."""
    return Plan() if assessment.observed.job.metadata.terminating else None


def job_unreadable(assessment: Assessment) -> Plan | None:
    """Leave a job alone that a newer version has written, with its pods and its status.

    A status of this version would remove what it cannot read. A spec that it cannot read is
    reported in the status as long as nothing runs.
    """
    problem = assessment.unreadable
    if not problem:
        return None
    message = (
        f"This version of the controller cannot read the job: {sentence(problem)} It leaves job"
        " and pods as they are. Upgrade the controller, or correct the field."
    )
    return Plan(writes=(StatusWrite(events=(Event("Warning", "Unreadable", message),)),))


class Step(Struct, frozen=True):
    """One rule. `decide` returns None if it does not apply.

    `leads_to` are the phases that its decisions may set. A job whose phase stays needs no Decision:
    its steps return the Plan.
    """

    decide: Callable[[Assessment], Decision | Plan | None]
    leads_to: tuple[Phase, ...]


STEPS: tuple[Step, ...] = (
    # A job whose phase stays: it is not for this controller, or it is over.
    Step(job_deleted, ()),
    Step(job_unreadable, ()),
    Step(job_finished, ()),
    # What ends a job comes first.
    Step(running.gang_succeeded, ("Succeeded",)),
    Step(endings.deadline_exceeded, ("TimedOut",)),
    Step(running.gang_deleted, ("Failed",)),
    # What the user or the queue asks for. While the pods end, the phase stays.
    Step(endings.suspended, ("Suspended",)),
    Step(endings.preempted, ("Preempted",)),
    Step(endings.start_timed_out, ("Queued",)),
    # A gang that exists, or existed: its failure fails the job, or it is kept going. If another
    # attempt is allowed after a failure, no step applies before create_gang.
    Step(running.gang_failed, ("Failed",)),
    Step(running.backing_off, ("Queued",)),
    Step(running.service_refused, ("Pending",)),
    Step(running.gang_exists, ("Queued", "Running", "Preempted")),
    # What is missing for the next attempt, cheapest first.
    Step(next_attempt.job_invalid, ("Pending",)),
    Step(next_attempt.queue_missing, ("Pending",)),
    Step(next_attempt.spec_invalid, ("Pending",)),
    Step(next_attempt.dependency_failed, ("Failed", "Pending")),
    Step(next_attempt.scheduler_missing, ("Pending",)),
    Step(next_attempt.workspace_not_ready, ("Syncing", "Failed", "Pending")),
    Step(next_attempt.dependencies_not_met, ("Queued",)),
    Step(next_attempt.checkpoints_terminating, ("Queued",)),
    Step(next_attempt.gang_refused, ("Pending",)),
    Step(next_attempt.not_admitted, ("Queued", "Preempted")),
    Step(next_attempt.nodes_not_read, ("Queued",)),
    Step(next_attempt.unfenced_not_recorded, ("Queued",)),
    Step(next_attempt.create_gang, ("Queued", "Pending")),
)


def reconcile(observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """Return the next writes for one job and the status that explains them.

    `now` is in UTC with whole seconds, as the API keeps times.
    """
    assessment = assess(observed, now, defaults)
    decision = first_decision(assessment)
    return decision if isinstance(decision, Plan) else plan(assessment, decision)


def first_decision(assessment: Assessment) -> Decision | Plan:
    """The decision of the first step that applies; the last one always does."""
    decisions = (step.decide(assessment) for step in STEPS)
    return next(decision for decision in decisions if decision is not None)


def plan(assessment: Assessment, decision: Decision) -> Plan:
    """Return the Plan of a decision: its writes, its status, and when to reconcile again."""
    observed, now, policy = assessment.observed, assessment.now, assessment.reliability
    composed = status.compose(assessment, decision)
    # Those for which the loss of their machine makes a difference.
    helper_pods = filter(alive, (*observed.workspace.sync_pods, *observed.workspace.setup_pods))
    pods = (*observed.gang.pods, *helper_pods)
    time_to_live = None
    if composed.phase in TERMINAL and policy.time_to_live is not None:
        time_to_live = max(policy.time_to_live.total_seconds(), 1.0)
    return build_plan(
        assessment,
        decision.writes,
        composed,
        events=events.list_events(assessment.last_status, composed, decision),
        requeue_after=soonest(
            decision.writes.requeue_after,
            nodes.next_loss(observed.cluster.nodes, pods, now),
            fence.next_release(
                observed.gang, observed.cluster.nodes, policy, assessment.unfenced, now
            ),
            sync_left(composed, policy.sync_timeout, now),
            deadline_left(composed, policy.deadline, now),
            time_to_live,
            progress.next_report(composed.progress, observed.gang.progress, now),
            checkpoints.next_record(composed, observed.gang, now),
        ),
    )
