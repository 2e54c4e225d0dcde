"""Towards a gang: first the workspace, then what stands beside the gang, then the gang itself."""

from datetime import datetime

from msgspec import Struct, structs
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.status import Attempt, LastFailure
from torchrun_controller.reconcile.gang import fence, gang
from torchrun_controller.reconcile.gang.child_jobs import child_jobs, roles_of
from torchrun_controller.reconcile.gang.decision import Decision
from torchrun_controller.reconcile.gang.failures import Cause
from torchrun_controller.reconcile.gang.restarts import Counts
from torchrun_controller.reconcile.job import dependencies, refusals
from torchrun_controller.reconcile.model.conditions import Why
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import Finding
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import network, volumes
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.objects.environment import Environment, environment_of
from torchrun_controller.reconcile.placement import avoid
from torchrun_controller.reconcile.pods import roles
from torchrun_controller.reconcile.schedulers.bind import bind
from torchrun_controller.reconcile.schedulers.choice import choose
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.requests import requests_of
from torchrun_controller.reconcile.spec.resolve import Run, resolve
from torchrun_controller.reconcile.workspace import claims, setup
from torchrun_controller.reconcile.workspace import preparation as workspace

QUEUE_FOUND = Why("QueueFound", "the queue is there")


class Successor(Struct, frozen=True, kw_only=True):
    """What the next gang inherits: counts, and how the gang before it ended."""

    counts: Counts
    ended: Attempt | None = None
    failure: LastFailure | None = None
    nodes: int | None = None  # None: as the spec says


def advance(
    observed: Observed, successor: Successor, now: datetime, defaults: Defaults
) -> Decision:
    """The first thing that is missing for the next gang, or the gang."""
    try:
        decision = _checked(observed, successor, now, defaults)
    except InvalidSpecError as error:
        decision = Decision(
            finding=Finding.SPEC_INVALID,
            why=Why("InvalidSpec", str(error)),
            attempt=observed.job.status.attempt,
            queue=QUEUE_FOUND if observed.queue is not None else None,
        )
    return replace(decision, counts=successor.counts, failure=successor.failure)


def _checked(
    observed: Observed, successor: Successor, now: datetime, defaults: Defaults
) -> Decision:
    job, queue = observed.job, observed.queue
    if job.invalid:
        raise InvalidSpecError(job.invalid)
    if queue is None:
        why = Why(
            "QueueNotFound",
            f"no TorchrunQueue {job.spec.job_queue} in namespace {job.metadata.namespace};"
            " create it, or choose one of: kubectl get torchrunqueues",
        )
        return Decision(finding=Finding.QUEUE_MISSING, why=why, attempt=job.status.attempt)
    if queue.metadata.deletion_timestamp is not None and not gang.has_been(observed):
        why = Why(
            "QueueTerminating",
            f"TorchrunQueue {queue.metadata.name} is being deleted and takes no new jobs;"
            " choose another, or wait until it is made anew",
        )
        return Decision(finding=Finding.QUEUE_MISSING, why=why, attempt=job.status.attempt)
    if queue.invalid:
        raise InvalidSpecError(f"TorchrunQueue {queue.metadata.name}: {queue.invalid}")
    run = resolve(job, queue)
    # What no pod can be made of is said before a workspace is prepared for it.
    for role in roles_of(run):
        worker_template(job, queue, run, None, 0, "", defaults, role)
    requests_of(job, queue, run.size)
    hold = dependencies.hold(observed)
    if hold is not None and hold.finding is not Finding.DEPENDENCY_WAITING:
        return Decision(
            finding=hold.finding,
            why=hold.why,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
        )
    if successor.nodes is not None:
        run = replace(run, size=replace(run.size, nodes=successor.nodes))
    missing = choose(queue, observed.installed, job).missing
    if missing is not None:
        return Decision(
            finding=Finding.SCHEDULER_MISSING,
            why=missing,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
        )
    return _unless_blocked(observed, _step(observed, run, successor, now, defaults))


def _step(
    observed: Observed, run: Run, successor: Successor, now: datetime, defaults: Defaults
) -> Decision:
    job = observed.job
    run, environment, step = _prepare(observed, run, now, defaults)
    if step.progress is not workspace.Progress.READY:
        refused = step.progress is workspace.Progress.REFUSED
        return Decision(
            finding=Finding.WORKSPACE_REFUSED if refused else Finding.WORKSPACE_SYNCING,
            why=step.why,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
            applies=step.applies,
            deletes=step.deletes,
            tells_first=step.tells_first,
            requeue_after=step.requeue_after,
        )
    held = _held(observed, run, successor, now)
    if held is not None:
        finding, why = held
        waits = finding is Finding.DEPENDENCY_WAITING
        return Decision(
            finding=finding,
            why=why,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
            workspace=step.why,
            dependencies=None if waits else dependencies.why_met(observed),
            commit=step.commit,
        )
    decision = _next_gang(observed, run, environment, successor, now, defaults)
    return replace(decision, workspace=step.why, commit=step.commit)


def _prepare(
    observed: Observed, run: Run, now: datetime, defaults: Defaults
) -> tuple[Run, Environment | None, workspace.Workspace]:
    """The workspace and what is set up above it, and the run as it is with them."""
    step = workspace.prepare(observed, run.workspace, now, defaults)
    if step.failed and run.workspace is not None:
        step = workspace.last_good(observed, run.workspace, now) or step
    if step.served is not None:
        assert run.workspace is not None
        run = replace(run, workspace=replace(run.workspace, served=step.served))
    environment = environment_of(run, step.content)
    if environment is not None and step.progress is workspace.Progress.READY:
        step = setup.prepare(observed, run, environment, now, defaults, step)
    return run, environment, step


def _next_gang(
    observed: Observed,
    run: Run,
    environment: Environment | None,
    successor: Successor,
    now: datetime,
    defaults: Defaults,
) -> Decision:
    """All that it needs is there."""
    job = observed.job
    attempt = gang.next_attempt(observed)
    avoided = avoid.failed_twice((*job.status.attempts, *filter(None, [successor.ended])))
    made = child_jobs(
        observed,
        run,
        attempt,
        defaults,
        counts=successor.counts,
        ended=_cause(successor),
        may_start=gang.is_over(observed) and not fence.holders(observed, attempt, now),
        environment=environment,
        avoided=avoid.hostnames(observed, avoided),
    )
    if successor.ended is None:
        # In the words of the next reconcile, which then has no status to write.
        why = Why("WorkersStarting", f"0 of {run.size.nodes} workers started")
    else:
        name = names.child_job(job.metadata.name, attempt)
        elsewhere = f", away from {', '.join(avoided)} if it can" if avoided else ""
        message = f"Job {name} is made{elsewhere}; after: {successor.ended.message}"
        why = Why("Restarting", message)
    return Decision(
        finding=Finding.READY,
        why=why,
        attempt=attempt,
        run=run,
        queue=QUEUE_FOUND,
        dependencies=dependencies.why_met(observed),
        applies=(*_beside(observed, run), *bind(observed, run, attempt, made)),
        deletes=(*gang.end_survivors(observed), *gang.forget_oldest(observed)),
        ended=() if successor.ended is None else (successor.ended,),
    )


def _cause(successor: Successor) -> Cause | None:
    ended = successor.ended
    return None if ended is None else Cause(**structs.asdict(ended), failure=successor.failure)


def _held(
    observed: Observed, run: Run, successor: Successor, now: datetime
) -> tuple[Finding, Why] | None:
    """What else a gang waits for when its workspace is ready: other jobs, its claim, the queue."""
    hold = dependencies.hold(observed)
    if hold is not None:
        return hold.finding, hold.why
    ending = _ending_checkpoints(observed, run)
    if ending is not None:
        return Finding.CLAIM_ENDING, ending
    why = admission_status.missing(observed, run.size)
    if why is None:
        return _unless_told(observed, now)
    gave_way = successor.ended is None and admission_status.was_preempted(observed)
    return Finding.PREEMPTED_WAITING if gave_way else Finding.ADMISSION_WAITING, why


def _unless_told(observed: Observed, now: datetime) -> tuple[Finding, Why] | None:
    """The next gang takes the place of the pods that alone tell of workers on lost nodes."""
    if not fence.untold(observed, now):
        return None
    message = "workers on lost nodes are recorded in status.unfenced before the next gang is made"
    return Finding.RECORDING_UNFENCED, Why("Restarting", message)


def _beside(observed: Observed, run: Run) -> tuple[Apply, ...]:
    """What must be there before the gang and is not."""
    missing = [*_checkpoints(observed, run)]
    if network.needs_service(run) and observed.service is None:
        missing.append(network.service(observed.job))
    if observed.queue is not None and observed.queue.spec.networking.isolate:
        missing.append(network.isolation(observed.job))
    return tuple(missing)


def _checkpoints(observed: Observed, run: Run) -> tuple[Apply, ...]:
    wanted = run.checkpoints
    if wanted is None or wanted.existing or claims.named(observed.claims, wanted.name) is not None:
        return ()
    return (volumes.claim(observed.job, wanted, names.CHECKPOINTS),)


def _ending_checkpoints(observed: Observed, run: Run) -> Why | None:
    wanted = run.checkpoints
    if wanted is None or wanted.existing:
        return None
    return claims.terminating(observed.claims, wanted.name)


def missing_checkpoints(observed: Observed) -> tuple[Apply, ...]:
    """The claim for checkpoints beside a gang that lives: its pods may not have mounted it yet."""
    if observed.queue is None:
        return ()
    try:
        return _checkpoints(observed, resolve(observed.job, observed.queue))
    except InvalidSpecError:
        return ()


def missing_service(observed: Observed) -> tuple[Apply, ...]:
    """The Service of a gang that lives, where somebody has deleted it."""
    several = roles.nodes_of(observed.child_jobs[-1]) > 1
    return (network.service(observed.job),) if several and observed.service is None else ()


def _unless_blocked(observed: Observed, decision: Decision) -> Decision:
    """Nothing is made while one of its names is held by others, or one of its parts is refused.

    The controller knows when it is to be tried again.
    """
    for apply in decision.applies:
        why = refusals.refusal_of(observed, apply)
        if why is not None:
            taken = why.reason == "NameConflict"
            finding = Finding.NAME_TAKEN if taken else Finding.REJECTED
            return _blocked(observed, decision, finding, why)
    return decision


def _blocked(observed: Observed, decision: Decision, finding: Finding, why: Why) -> Decision:
    return replace(
        decision,
        finding=finding,
        why=why,
        attempt=observed.job.status.attempt,
        applies=(),
        deletes=(),
        ended=(),
        requeue_after=None,
    )
