"""The pure core: what is observed goes in, a Plan comes out.

`reconcile` is a function of its arguments alone: no I/O, no clock, no memory. All memory is in the
API's objects, so that the process may be killed anywhere and nothing is lost or done twice.
"""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds import SERVICES
from torchrun_controller.reconcile import gang, network, status, storage, workspace
from torchrun_controller.reconcile.decision import Decision
from torchrun_controller.reconcile.job import child_job
from torchrun_controller.reconcile.observed import Conflict, Defaults, Observed, Rejection
from torchrun_controller.reconcile.phases import Finding, transition
from torchrun_controller.reconcile.plan import Apply, Delete, Event, Plan
from torchrun_controller.reconcile.run import InvalidSpecError, Run, resolve
from torchrun_controller.reconcile.workers import Why

__all__ = [
    "Apply",
    "Conflict",
    "Defaults",
    "Delete",
    "Event",
    "Observed",
    "Plan",
    "Rejection",
    "reconcile",
]

# Seconds until a name held by others, or an object that was refused, is tried again.
BLOCKED_RETRY = 30.0
QUEUE_FOUND = Why("QueueFound", "the queue is there")


def reconcile(observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """The next step of one job. `now` is in UTC with whole seconds, as the API keeps times."""
    present = observed.job.status
    if observed.job.metadata.deletion_timestamp is not None:
        return Plan()
    decision = _decide(observed, now, defaults)
    row = transition(present.phase, decision.finding)
    if row is None:
        return Plan(status=status.refine(observed))
    wanted = status.compose(observed, decision, row, now)
    return Plan(
        applies=decision.applies,
        deletes=decision.deletes,
        status=None if wanted == status.ordered(present) else wanted,
        events=status.events(present, decision, row),
        requeue_after=decision.requeue_after,
    )


def _decide(observed: Observed, now: datetime, defaults: Defaults) -> Decision:
    """The first finding that holds."""
    job, queue = observed.job, observed.queue
    if observed.child_jobs:
        return _watch(observed)
    attempt = job.status.attempt
    if job.invalid:
        why = Why("InvalidSpec", job.invalid)
        return Decision(finding=Finding.SPEC_INVALID, why=why, attempt=attempt)
    if queue is None:
        why = Why(
            "QueueNotFound",
            f"no TorchrunQueue {job.spec.job_queue} in namespace {job.metadata.namespace};"
            " create it, or choose one of: kubectl get torchrunqueues",
        )
        return Decision(finding=Finding.QUEUE_MISSING, why=why, attempt=attempt)
    try:
        if queue.invalid:
            raise InvalidSpecError(f"TorchrunQueue {queue.metadata.name}: {queue.invalid}")
        return _advance(observed, resolve(job, queue), now, defaults)
    except InvalidSpecError as error:
        why = Why("InvalidSpec", str(error))
        return Decision(finding=Finding.SPEC_INVALID, why=why, attempt=attempt, queue=QUEUE_FOUND)


def _watch(observed: Observed) -> Decision:
    """A gang is there: say how it stands, and make its Service again if it is gone."""
    child = observed.child_jobs[-1]
    finding, why = gang.find(child, observed.workers)
    over = finding in (Finding.GANG_SUCCEEDED, Finding.GANG_FAILED)
    name = names.service(observed.job.metadata.name)
    lacks_service = (
        gang.nodes_of(child) > 1
        and observed.service is None
        and not _held(observed, SERVICES.resource, name)
    )
    return Decision(
        finding=finding,
        why=why,
        attempt=gang.attempt_of(child),
        run=_resolved(observed),
        queue=QUEUE_FOUND if observed.queue else None,
        workspace=workspace.SYNCED if observed.sync_pods else None,
        applies=(network.service(observed.job),) if lacks_service and not over else (),
    )


def _resolved(observed: Observed) -> Run | None:
    """The run, where the status does not know its size yet: the gang is older than any status."""
    if observed.job.status.gpus is not None or observed.queue is None:
        return None
    try:
        return resolve(observed.job, observed.queue)
    except InvalidSpecError:
        return None


def _advance(observed: Observed, run: Run, now: datetime, defaults: Defaults) -> Decision:
    """No gang yet: first the workspace, then what stands beside the gang, then the gang."""
    job, queue = observed.job, observed.queue
    assert queue is not None
    attempt = gang.next_attempt(observed)
    gang_job = child_job(job, queue, run, attempt, defaults)
    step = workspace.prepare(observed, run.workspace, now, defaults)
    ready = step.progress is workspace.Progress.READY
    finding = {
        workspace.Progress.READY: Finding.READY,
        workspace.Progress.SYNCING: Finding.WORKSPACE_SYNCING,
        workspace.Progress.REFUSED: Finding.WORKSPACE_REFUSED,
    }[step.progress]
    starting = Why("WorkersStarting", f"Job {names.child_job(job.metadata.name, attempt)} is made")
    decision = Decision(
        finding=finding,
        why=starting if ready else step.why,
        attempt=attempt if ready else job.status.attempt,
        run=run,
        queue=QUEUE_FOUND,
        workspace=step.why if ready else None,
        applies=(*_beside(observed, run), gang_job) if ready else step.applies,
        deletes=step.deletes,
        requeue_after=step.requeue_after,
    )
    return _unless_blocked(observed, decision)


def _beside(observed: Observed, run: Run) -> tuple[Apply, ...]:
    """What must be there before the gang and is not."""
    missing: list[Apply] = []
    wanted = run.checkpoints
    known = {claim.metadata.name for claim in observed.claims}
    if wanted is not None and not wanted.existing and wanted.name not in known:
        missing.append(storage.claim(observed.job, wanted, names.CHECKPOINTS))
    if network.needs_service(run) and observed.service is None:
        missing.append(network.service(observed.job))
    return tuple(missing)


def _unless_blocked(observed: Observed, decision: Decision) -> Decision:
    """Nothing is made while one of its names is held by others, or one of its parts is refused."""
    for apply in decision.applies:
        conflict = _held(observed, apply.kind.resource, apply.name)
        if conflict is not None:
            why = Why("NameConflict", conflict.message)
            return _blocked(decision, Finding.NAME_TAKEN, why)
    refused = observed.rejection
    if refused is not None:
        message = f"the API server refused {refused.resource} {refused.name}: {refused.message}"
        return _blocked(decision, Finding.REJECTED, Why("Rejected", message))
    return decision


def _blocked(decision: Decision, finding: Finding, why: Why) -> Decision:
    return replace(
        decision, finding=finding, why=why, applies=(), deletes=(), requeue_after=BLOCKED_RETRY
    )


def _held(observed: Observed, resource: str, name: str) -> Conflict | None:
    held = (c for c in observed.conflicts if (c.resource, c.name) == (resource, name))
    return next(held, None)
