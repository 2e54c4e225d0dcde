"""The steps for a gang that exists: it succeeded, failed, waits for its successor, or goes on."""

from torchrun_api import names
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_controller.reconcile.gang import cleanup, fence, gate
from torchrun_controller.reconcile.gang.restarts import AWAITING_EDIT
from torchrun_controller.reconcile.gang.state import STARTING
from torchrun_controller.reconcile.job import dependencies, refusals
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.job.decisions import (
    NOTHING,
    Decision,
    DecisionWrites,
    Known,
    decide,
)
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import ObservedGang, ObservedWorkspace
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.model.times import soonest
from torchrun_controller.reconcile.objects import volumes
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, resolve
from torchrun_controller.reconcile.workspace import claims, delivery, preparation, reload
from torchrun_controller.reconcile.workspace.sync_pods import find_commit


def know_gang(assessment: Assessment) -> Known:
    """Return what the status says of the present gang; nothing of a gang whose Job is gone."""
    observed = assessment.observed
    job, queue = observed.job, observed.queue
    if assessment.gang is None:
        return NOTHING
    # A gang that is older than any status: no status has its size.
    spec = resolve(job, queue) if job.status.gpus is None and queue is not None else None
    workspace = preparation.describe_workspace(job, observed.workspace, spec)
    met_reason = dependencies.describe_met(job)
    conditions = []
    if workspace is not None:
        conditions.append(ConditionUpdate("WorkspaceReady", "True", workspace))
    # The status with which the gang was created may be lost, so the parents are evaluated again.
    if met_reason is not None and dependencies.are_met(job, observed.parents):
        conditions.append(ConditionUpdate(dependencies.CONDITION, "True", met_reason))
    revision = reload.find_running_revision(job, observed.gang)
    return Known(
        spec=spec,
        conditions=tuple(conditions),
        commit=find_commit(job, observed.workspace, revision),
    )


def gang_succeeded(assessment: Assessment) -> Decision | None:
    """End the job as succeeded. Success takes precedence over everything else."""
    gang_state = assessment.gang
    if gang_state is None or gang_state.state is not State.GANG_SUCCEEDED:
        return None
    return decide(assessment, gang_state.state, gang_state.why, know_gang(assessment))


def gang_deleted(assessment: Assessment) -> Decision | None:
    """Fail a job whose gang was deleted, suspended or not, if no other attempt is allowed."""
    return gang_failed(assessment) if assessment.gang is None else None


def gang_failed(assessment: Assessment) -> Decision | None:
    """Fail the job if the failure policy does not allow another attempt."""
    end = assessment.end
    if end is None or not end.fails_job:
        return None
    return decide(
        assessment,
        State.GANG_FAILED,
        end.why,
        know_gang(assessment),
        history=end.history,
        writes=DecisionWrites(deletes=assessment.survivors),
    )


def backing_off(assessment: Assessment) -> Decision | None:
    """Wait before the next attempt, longer after each failure in a row."""
    end, wait = assessment.end, assessment.backoff
    if end is None or wait is None:
        return None
    return decide(
        assessment,
        State.BACKING_OFF,
        wait.why,
        know_gang(assessment),
        history=end.history,
        writes=DecisionWrites(deletes=assessment.survivors, requeue_after=wait.seconds_left),
    )


def service_refused(assessment: Assessment) -> Decision | None:
    """Keep a new gang waiting while its Service is refused: its pods cannot find each other."""
    if assessment.service_refusal is None:
        return None
    state, why = assessment.service_refusal
    writes, conditions = _keep_running(assessment)
    return decide(assessment, state, why, know_gang(assessment), *conditions, writes=writes)


def gang_exists(assessment: Assessment) -> Decision | None:
    """Keep the gang running, with the next step of a hot reload."""
    observed, gang_state, outlook = assessment.observed, assessment.gang, assessment.outlook
    if gang_state is None or assessment.end is not None:
        return None
    state, why = gang_state.state, gang_state.why
    writes, conditions = _keep_running(assessment)
    writes = writes.and_also(requeue_after=outlook.requeue_after)
    # The scheduler has not decided on the size yet: each gang starts like that.
    is_new = why.reason in (STARTING, "Restarting")
    if outlook.condition is not None and not is_new:
        conditions += (outlook.condition,)
        if outlook.condition.status == "False":
            why = _with_capacity(state, why, outlook.condition.why)
    is_suspended = state not in (State.GANG_RUNNING, State.GANG_STARTING)
    step = (
        None if is_suspended else reload.plan_reload(observed, assessment.now, assessment.defaults)
    )
    if step is not None:
        condition = reload.check_up_to_date(observed.job, observed.gang, observed.workspace, step)
        conditions += () if condition is None else (condition,)
        writes = writes.and_also(
            applies=refusals.all_or_refused(observed.refused, step.applies),
            deletes=step.deletes,
            requeue_after=step.requeue_after,
        )
    return decide(assessment, state, why, know_gang(assessment), *conditions, writes=writes)


def _keep_running(assessment: Assessment) -> tuple[DecisionWrites, tuple[ConditionUpdate, ...]]:
    """Return what a gang needs: its PVC, its Service, its launcher instructions; and a warning."""
    observed, now, gang_state = assessment.observed, assessment.now, assessment.gang
    assert gang_state is not None
    job, gang, workspace = observed.job, observed.gang, observed.workspace
    missing_claims = _missing_checkpoints(job, observed.queue, gang, workspace)
    blocking_pods = fence.blocking_pods(
        gang, observed.cluster.nodes, assessment.unfenced, assessment.attempt, now
    )
    instructions = gate.instruct_launchers(
        job, gang, workspace, blocking_pods, assessment.new_restarts, now
    )
    writes = DecisionWrites(
        applies=(*missing_claims, *assessment.missing_service, *instructions),
        deletes=cleanup.end_stale_pods(job, gang),
        requeue_after=soonest(gang_state.seconds_left, gate.next_repeat(gang, now)),
    )
    accepted_claims = refusals.accepted_applies(observed.refused, missing_claims)
    problem = claims.check_mounted(delivery.mounted_claims(job, gang, workspace), accepted_claims)
    if problem is None:
        return writes, ()
    return writes, (ConditionUpdate("StorageReady", "False", problem),)


def _with_capacity(state: State, why: Reason, capacity: Reason) -> Reason:
    """Return the capacity as the reason of a gang whose ranks run; a waiting gang has both."""
    if state is State.GANG_RUNNING and why.reason != AWAITING_EDIT:
        return capacity
    return Reason(why.reason, f"{sentence(why.message)} {capacity.message}")


def _missing_checkpoints(
    job: TorchrunJob,
    queue: TorchrunQueue | None,
    gang: ObservedGang,
    workspace: ObservedWorkspace,
) -> tuple[Apply, ...]:
    """Return the missing PVC for checkpoints of a running gang; its pods may not mount it yet.

    A queue that gets checkpoints while the gang runs has them for the next one.
    """
    if queue is None or not (queue.spec.storage.checkpoints or job.spec.volumes.checkpoints):
        return ()
    mounted = head_and_workers.claims_of(gang)
    missing = missing_checkpoints(job, workspace, resolve(job, queue))
    return tuple(claim for claim in missing if claim.name in mounted)


def missing_checkpoints(
    job: TorchrunJob, workspace: ObservedWorkspace, spec: ResolvedSpec
) -> tuple[Apply, ...]:
    """Return the PVC for checkpoints, if the job has one of its own that does not exist."""
    source = spec.checkpoints
    if (
        source is None
        or source.existing
        or claims.find_claim(workspace.claims, source.name) is not None
    ):
        return ()
    return (volumes.claim(job, source, names.CHECKPOINTS),)
