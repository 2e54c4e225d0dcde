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
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import State
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
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, resolve_spec
from torchrun_controller.reconcile.workspace import claims, setup
from torchrun_controller.reconcile.workspace import preparation as workspace

QUEUE_FOUND = Reason("QueueFound", "the queue is there")


class NextAttempt(Struct, frozen=True, kw_only=True):
    """What the next gang inherits: counts, and how the gang before it ended."""

    counts: Counts
    ended: Attempt | None = None
    failure: LastFailure | None = None
    nodes: int | None = None  # None: as the spec says


def advance(
    observed: Observed, next_attempt: NextAttempt, now: datetime, defaults: Defaults
) -> Decision:
    """The first thing that is missing for the next gang, or the gang."""
    try:
        decision = _checked(observed, next_attempt, now, defaults)
    except InvalidSpecError as error:
        decision = Decision(
            state=State.SPEC_INVALID,
            why=Reason("InvalidSpec", str(error)),
            attempt=observed.job.status.attempt,
            queue=QUEUE_FOUND if observed.queue is not None else None,
        )
    return replace(decision, counts=next_attempt.counts, failure=next_attempt.failure)


def _checked(
    observed: Observed, next_attempt: NextAttempt, now: datetime, defaults: Defaults
) -> Decision:
    job, queue = observed.job, observed.queue
    if job.invalid:
        raise InvalidSpecError(job.invalid)
    if queue is None:
        why = Reason(
            "QueueNotFound",
            f"no TorchrunQueue {job.spec.job_queue} in namespace {job.metadata.namespace};"
            " create it, or choose one of: kubectl get torchrunqueues",
        )
        return Decision(state=State.QUEUE_MISSING, why=why, attempt=job.status.attempt)
    if queue.metadata.deletion_timestamp is not None and not gang.has_been(observed):
        why = Reason(
            "QueueTerminating",
            f"TorchrunQueue {queue.metadata.name} is being deleted and takes no new jobs;"
            " choose another, or wait until it is made anew",
        )
        return Decision(state=State.QUEUE_MISSING, why=why, attempt=job.status.attempt)
    if queue.invalid:
        raise InvalidSpecError(f"TorchrunQueue {queue.metadata.name}: {queue.invalid}")
    run = resolve_spec(job, queue)
    # What no pod can be made of is said before a workspace is prepared for it.
    for role in roles_of(run):
        worker_template(job, queue, run, None, 0, "", defaults, role)
    requests_of(job, queue, run.size)
    hold = dependencies.hold(observed)
    if hold is not None and hold.state is not State.DEPENDENCY_WAITING:
        return Decision(
            state=hold.state,
            why=hold.why,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
        )
    if next_attempt.nodes is not None:
        run = replace(run, size=replace(run.size, nodes=next_attempt.nodes))
    missing = choose(queue, observed.installed, job).missing
    if missing is not None:
        return Decision(
            state=State.SCHEDULER_MISSING,
            why=missing,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
        )
    return _unless_blocked(observed, _step(observed, run, next_attempt, now, defaults))


def _step(
    observed: Observed,
    run: ResolvedSpec,
    next_attempt: NextAttempt,
    now: datetime,
    defaults: Defaults,
) -> Decision:
    job = observed.job
    run, environment, step = _prepare(observed, run, now, defaults)
    if step.state is not workspace.SyncState.READY:
        refused = step.state is workspace.SyncState.REFUSED
        return Decision(
            state=State.WORKSPACE_REFUSED if refused else State.WORKSPACE_SYNCING,
            why=step.why,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
            applies=step.applies,
            deletes=step.deletes,
            status_before_deletes=step.status_before_deletes,
            requeue_after=step.requeue_after,
        )
    held = _held(observed, run, next_attempt, now)
    if held is not None:
        state, why = held
        waits = state is State.DEPENDENCY_WAITING
        return Decision(
            state=state,
            why=why,
            attempt=job.status.attempt,
            run=run,
            queue=QUEUE_FOUND,
            workspace=step.why,
            dependencies=None if waits else dependencies.why_met(observed),
            commit=step.commit,
        )
    decision = _next_gang(observed, run, environment, next_attempt, now, defaults)
    return replace(decision, workspace=step.why, commit=step.commit)


def _prepare(
    observed: Observed, run: ResolvedSpec, now: datetime, defaults: Defaults
) -> tuple[ResolvedSpec, Environment | None, workspace.Workspace]:
    """The workspace and what is set up above it, and the run as it is with them."""
    step = workspace.prepare(observed, run.workspace, now, defaults)
    if step.failed and run.workspace is not None:
        step = workspace.last_good(observed, run.workspace, now) or step
    if step.served is not None:
        assert run.workspace is not None
        run = replace(run, workspace=replace(run.workspace, served=step.served))
    environment = environment_of(run, step.content)
    if environment is not None and step.state is workspace.SyncState.READY:
        step = setup.prepare(observed, run, environment, now, defaults, step)
    return run, environment, step


def _next_gang(
    observed: Observed,
    run: ResolvedSpec,
    environment: Environment | None,
    next_attempt: NextAttempt,
    now: datetime,
    defaults: Defaults,
) -> Decision:
    """All that it needs is there."""
    job = observed.job
    attempt = gang.next_attempt(observed)
    avoided = avoid.failed_twice((*job.status.attempts, *filter(None, [next_attempt.ended])))
    made = child_jobs(
        observed,
        run,
        attempt,
        defaults,
        counts=next_attempt.counts,
        ended=_cause(next_attempt),
        may_start=gang.is_over(observed) and not fence.blocking_pods(observed, attempt, now),
        environment=environment,
        avoided=avoid.hostnames(observed, avoided),
    )
    if next_attempt.ended is None:
        # In the words of the next reconcile, which then has no status to write.
        why = Reason("WorkersStarting", f"0 of {run.size.nodes} workers started")
    else:
        name = names.child_job(job.metadata.name, attempt)
        elsewhere = f", away from {', '.join(avoided)} if it can" if avoided else ""
        message = f"Job {name} is made{elsewhere}; after: {next_attempt.ended.message}"
        why = Reason("Restarting", message)
    return Decision(
        state=State.READY,
        why=why,
        attempt=attempt,
        run=run,
        queue=QUEUE_FOUND,
        dependencies=dependencies.why_met(observed),
        applies=(*_beside(observed, run), *bind(observed, run, attempt, made)),
        deletes=(*gang.end_survivors(observed), *gang.forget_oldest(observed)),
        ended=() if next_attempt.ended is None else (next_attempt.ended,),
    )


def _cause(next_attempt: NextAttempt) -> Cause | None:
    ended = next_attempt.ended
    return None if ended is None else Cause(**structs.asdict(ended), failure=next_attempt.failure)


def _held(
    observed: Observed, run: ResolvedSpec, next_attempt: NextAttempt, now: datetime
) -> tuple[State, Reason] | None:
    """What else a gang waits for when its workspace is ready: other jobs, its claim, the queue."""
    hold = dependencies.hold(observed)
    if hold is not None:
        return hold.state, hold.why
    ending = _ending_checkpoints(observed, run)
    if ending is not None:
        return State.CLAIM_ENDING, ending
    why = admission_status.missing(observed, run.size)
    if why is None:
        return _unless_told(observed, now)
    gave_way = next_attempt.ended is None and admission_status.was_preempted(observed)
    return State.PREEMPTED_WAITING if gave_way else State.ADMISSION_WAITING, why


def _unless_told(observed: Observed, now: datetime) -> tuple[State, Reason] | None:
    """The next gang takes the place of the pods that alone tell of workers on lost nodes."""
    if not fence.unrecorded(observed, now):
        return None
    message = "workers on lost nodes are recorded in status.unfenced before the next gang is made"
    return State.RECORDING_UNFENCED, Reason("Restarting", message)


def _beside(observed: Observed, run: ResolvedSpec) -> tuple[Apply, ...]:
    """What must be there before the gang and is not."""
    missing = [*_checkpoints(observed, run)]
    if network.needs_service(run) and observed.service is None:
        missing.append(network.service(observed.job))
    if observed.queue is not None and observed.queue.spec.networking.isolate:
        missing.append(network.isolation(observed.job))
    return tuple(missing)


def _checkpoints(observed: Observed, run: ResolvedSpec) -> tuple[Apply, ...]:
    wanted = run.checkpoints
    if wanted is None or wanted.existing or claims.named(observed.claims, wanted.name) is not None:
        return ()
    return (volumes.claim(observed.job, wanted, names.CHECKPOINTS),)


def _ending_checkpoints(observed: Observed, run: ResolvedSpec) -> Reason | None:
    wanted = run.checkpoints
    if wanted is None or wanted.existing:
        return None
    return claims.terminating(observed.claims, wanted.name)


def missing_checkpoints(observed: Observed) -> tuple[Apply, ...]:
    """The claim for checkpoints beside a gang that lives: its pods may not have mounted it yet."""
    if observed.queue is None:
        return ()
    try:
        return _checkpoints(observed, resolve_spec(observed.job, observed.queue))
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
            state = State.NAME_TAKEN if taken else State.REJECTED
            return _blocked(observed, decision, state, why)
    return decision


def _blocked(observed: Observed, decision: Decision, state: State, why: Reason) -> Decision:
    return replace(
        decision,
        state=state,
        why=why,
        attempt=observed.job.status.attempt,
        applies=(),
        deletes=(),
        ended=(),
        requeue_after=None,
    )
