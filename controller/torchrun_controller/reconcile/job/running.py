"""The steps for a gang that exists: it succeeded, failed, waits for its successor, or goes on."""

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.job import TorchrunJob
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.gang import cleanup, fence, gate
from torchrun_controller.reconcile.gang.decision import NO_WRITES, Decision, Writes
from torchrun_controller.reconcile.gang.restarts import AWAITING_EDIT, describe_limit
from torchrun_controller.reconcile.gang.state import STARTING
from torchrun_controller.reconcile.job import dependencies, refusals
from torchrun_controller.reconcile.job.assess import Assessment
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import ObservedGang, ObservedWorkspace
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import volumes
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import attempt_of
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, resolve
from torchrun_controller.reconcile.workspace import claims, delivery, preparation, reload
from torchrun_controller.reconcile.workspace.sync_pods import find_commit


def decide_on_gang(
    assessment: Assessment, state: State, why: Reason, writes: Writes = NO_WRITES
) -> Decision:
    """Return a decision on the present gang, or on a gang that has ended, with its conditions."""
    observed = assessment.observed
    if assessment.gang is None:
        return Decision(
            state=state,
            why=why,
            attempt=assessment.attempt,
            history=assessment.history,
            writes=writes,
        )
    spec = _spec_of_unrecorded_gang(observed.job, observed.queue)
    revision = reload.find_running_revision(observed.job, observed.gang)
    workspace = preparation.describe_workspace(observed.job, observed.workspace, spec)
    met_reason = dependencies.describe_met(observed.job)
    conditions = []
    if workspace is not None:
        conditions.append(ConditionUpdate("WorkspaceReady", "True", workspace))
    # The status with which the gang was created may be lost, so the parents are evaluated again.
    if met_reason is not None and dependencies.are_met(observed.job, observed.parents):
        conditions.append(ConditionUpdate(dependencies.CONDITION, "True", met_reason))
    return Decision(
        state=state,
        why=why,
        attempt=assessment.attempt,
        spec=spec,
        conditions=tuple(conditions),
        history=assessment.history,
        writes=writes,
        commit=find_commit(observed.job, observed.workspace, revision),
    )


def gang_succeeded(assessment: Assessment) -> Decision | None:
    """End the job as succeeded. Success takes precedence over everything else."""
    gang_state = assessment.gang
    if gang_state is None or gang_state.state is not State.GANG_SUCCEEDED:
        return None
    return decide_on_gang(assessment, gang_state.state, gang_state.why)


def gang_deleted(assessment: Assessment) -> Decision | None:
    """Fail a job whose gang was deleted, suspended or not, if no other attempt is allowed."""
    return _fail(assessment) if assessment.gang is None else None


def gang_failed(assessment: Assessment) -> Decision | None:
    """Fail the job if the failure policy does not allow another attempt."""
    return _fail(assessment)


def _fail(assessment: Assessment) -> Decision | None:
    end = assessment.end
    if end is None or not end.fails_job:
        return None
    because = describe_limit(assessment.reliability, assessment.history.counts)
    why = Reason(end.why.reason, end.why.message + because)
    writes = Writes(deletes=assessment.survivors)
    return replace(decide_on_gang(assessment, State.GANG_FAILED, why, writes), history=end.history)


def backing_off(assessment: Assessment) -> Decision | None:
    """Wait before the next attempt, longer after each failure in a row."""
    end, wait = assessment.end, assessment.backoff
    if end is None or wait is None:
        return None
    writes = Writes(deletes=assessment.survivors, requeue_after=wait.seconds_left)
    return replace(
        decide_on_gang(assessment, State.BACKING_OFF, wait.why, writes), history=end.history
    )


def service_refused(assessment: Assessment) -> Decision | None:
    """Keep a new gang waiting while its Service is refused: its pods cannot find each other."""
    if assessment.service_refusal is None:
        return None
    state, why = assessment.service_refusal
    return replace(_keep_running(assessment), state=state, why=why)


def gang_exists(assessment: Assessment) -> Decision | None:
    """Keep the gang running, with the next step of a hot reload."""
    if assessment.gang is None or assessment.end is not None:
        return None
    outlook, decision = assessment.outlook, _keep_running(assessment)
    # The scheduler has not decided on the size yet: each gang starts like that.
    is_new = decision.why.reason in (STARTING, "Restarting")
    size = None if is_new else outlook.condition
    if size is not None and size.status == "False":
        decision = replace(decision, why=_with_capacity(decision, size.why))
    return _add_reload(
        assessment,
        replace(
            decision,
            conditions=(*decision.conditions, *((size,) if size else ())),
            writes=decision.writes.and_also(requeue_after=outlook.requeue_after),
        ),
    )


def _keep_running(assessment: Assessment) -> Decision:
    """Return the decision on a running gang: its PVC, its Service, its launcher instructions."""
    observed, now, gang_state = assessment.observed, assessment.now, assessment.gang
    assert gang_state is not None
    job, gang, workspace = observed.job, observed.gang, observed.workspace
    missing_claims = _missing_checkpoints(job, observed.queue, gang, workspace)
    attempt = attempt_of(gang.current_job)
    blocking_pods = fence.blocking_pods(
        gang, observed.cluster.nodes, assessment.unfenced, attempt, now
    )
    instructions = gate.instruct_launchers(
        job, gang, workspace, blocking_pods, assessment.new_restarts, now
    )
    writes = Writes(
        applies=(*missing_claims, *assessment.missing_service, *instructions),
        deletes=cleanup.end_stale_pods(job, gang),
    )
    decision = decide_on_gang(
        assessment,
        gang_state.state,
        gang_state.why,
        writes.and_also(requeue_after=gang_state.seconds_left).and_also(
            requeue_after=gate.next_repeat(gang, now)
        ),
    )
    accepted_claims = refusals.accepted_applies(observed.refused, missing_claims)
    problem = claims.check_mounted(delivery.mounted_claims(job, gang, workspace), accepted_claims)
    if problem is None:
        return decision
    storage = ConditionUpdate("StorageReady", "False", problem)
    return replace(decision, conditions=(*decision.conditions, storage))


def _add_reload(assessment: Assessment, decision: Decision) -> Decision:
    """Add the next step of the sync pod for a gang that is not suspended."""
    if decision.state not in (State.GANG_RUNNING, State.GANG_STARTING):
        return decision
    observed = assessment.observed
    step = reload.plan_reload(observed, assessment.now, assessment.defaults)
    if step is None:
        return decision
    condition = reload.check_up_to_date(observed.job, observed.gang, observed.workspace, step)
    return replace(
        decision,
        conditions=(*decision.conditions, *((condition,) if condition is not None else ())),
        writes=decision.writes.and_also(
            applies=refusals.all_or_refused(observed.refused, step.applies),
            deletes=step.deletes,
            requeue_after=step.requeue_after,
        ),
    )


def _with_capacity(decision: Decision, capacity: Reason) -> Reason:
    """Return the capacity as the reason of a gang whose ranks run; a waiting gang has both."""
    if decision.state is State.GANG_RUNNING and decision.why.reason != AWAITING_EDIT:
        return capacity
    return Reason(decision.why.reason, f"{sentence(decision.why.message)} {capacity.message}")


def _spec_of_unrecorded_gang(job: TorchrunJob, queue: TorchrunQueue | None) -> ResolvedSpec | None:
    """Return the spec of a gang that is older than any status; None if its size is recorded."""
    if job.status.gpus is not None or queue is None:
        return None
    return resolve(job, queue)


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
