"""The steps towards the next attempt: what is missing for it, cheapest first, and its gang."""

from msgspec import Struct, structs
from msgspec.structs import replace

from torchrun_api import names
from torchrun_controller.reconcile.gang import cleanup, fence, gang
from torchrun_controller.reconcile.gang.decision import NO_WRITES, Decision, Writes
from torchrun_controller.reconcile.gang.failures import Cause
from torchrun_controller.reconcile.gang.gang import build_child_jobs, roles_of
from torchrun_controller.reconcile.gang.gate import find_orphans, orphan_advice
from torchrun_controller.reconcile.gang.restarts import restart_limits
from torchrun_controller.reconcile.gang.state import STARTING
from torchrun_controller.reconcile.job import dependencies, refusals
from torchrun_controller.reconcile.job.context import Context, NextAttempt
from torchrun_controller.reconcile.job.running import missing_checkpoints
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import pods_are, sentence
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply, Event
from torchrun_controller.reconcile.model.times import sync_left
from torchrun_controller.reconcile.objects import network
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.placement import hostnames, nodes_to_avoid
from torchrun_controller.reconcile.pods.nodes import NODES_RETRY, NOT_READ
from torchrun_controller.reconcile.schedulers.groups import build_gang_objects
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS, choose
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.admission_status import REQUESTED
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec
from torchrun_controller.reconcile.spec.validation import validate
from torchrun_controller.reconcile.workspace import claims
from torchrun_controller.reconcile.workspace.helper_pods import SyncState


def job_invalid(context: Context) -> Decision | None:
    """Refuse a job that violates its schema."""
    if context.observed.job.invalid:
        raise InvalidSpecError(f"The TorchrunJob is invalid: {context.observed.job.invalid}")
    return None


def queue_missing(context: Context) -> Decision | None:
    """Wait for the queue. A queue that is being deleted accepts no new jobs."""
    job, queue = context.observed.job, context.observed.queue
    is_fixed = gang.was_created(job, context.observed.gang)
    if queue is None:
        advice = "it" if is_fixed else "it or choose another queue (kubectl get torchrunqueues)"
        why = Reason(
            "QueueNotFound",
            f"TorchrunQueue {job.spec.job_queue} does not exist in namespace"
            f" {job.metadata.namespace}. Create {advice}.",
        )
        return _decide(context, State.QUEUE_MISSING, why)
    if queue.metadata.terminating and not is_fixed:
        why = Reason(
            "QueueTerminating",
            f"TorchrunQueue {queue.metadata.name} is being deleted and accepts no new"
            " jobs. Choose another queue, or create it again.",
        )
        return _decide(context, State.QUEUE_MISSING, why)
    return None


def spec_invalid(context: Context) -> Decision | None:
    """Refuse an invalid spec before preparing a workspace.

    The rules apply to what is new: a spec that had a gang restarts as it is.
    """
    job, queue = context.observed.job, context.observed.queue
    assert queue is not None
    if queue.invalid:
        raise InvalidSpecError(f"TorchrunQueue {queue.metadata.name} is invalid: {queue.invalid}")
    if gang.has_new_spec(job, context.observed.gang):
        validate(job, queue)
    spec = context.spec
    for role in roles_of(spec):
        worker_template(job, queue, spec, None, 0, "", context.defaults, role)
    return None


def refuse(context: Context, error: InvalidSpecError) -> Decision:
    """The decision on a job with an invalid spec."""
    why = Reason("InvalidSpec", sentence(str(error)))
    return _decide(context, State.SPEC_INVALID, why)


def dependency_failed(context: Context) -> Decision | None:
    """Fail a job whose dependency has failed, and refuse a cycle."""
    unmet = context.unmet_dependencies
    if unmet is None or unmet.state is State.DEPENDENCY_WAITING:
        return None
    return _decide(context, unmet.state, unmet.why, spec=context.spec)


def scheduler_missing(context: Context) -> Decision | None:
    """Wait for the gang scheduler that the queue requests."""
    observed = context.observed
    assert observed.queue is not None
    why = choose(observed.queue, observed.cluster.installed, observed.job).missing
    if why is None:
        return None
    return _decide(context, State.SCHEDULER_MISSING, why, spec=context.spec)


def workspace_not_ready(context: Context) -> Decision | None:
    """Prepare the workspace, within syncTimeoutSeconds."""
    step = context.preparation.step
    if step.state is SyncState.READY:
        return None
    is_refused = step.state is SyncState.REFUSED
    state, why = State.WORKSPACE_REFUSED if is_refused else State.WORKSPACE_SYNCING, step.why
    writes = Writes(
        applies=step.applies,
        deletes=step.deletes,
        status_before_deletes=step.status_before_deletes,
        requeue_after=step.requeue_after,
    )
    refusal = refusals.find_first(context.observed.refused, writes.applies)
    timeout = context.reliability.sync_timeout
    seconds_left = sync_left(context.observed.job.status, timeout, context.now)
    if refusal is not None:
        (state, why), writes = refusal, Writes()
    elif timeout is not None and seconds_left is not None and seconds_left <= 0:
        message = f"The workspace was not ready within {timeout.total_seconds():.0f} s"
        why = Reason("SyncTimeout", f"{message} (syncTimeoutSeconds). {why.message}")
        state, writes = State.SYNC_TIMED_OUT, replace(writes, applies=(), deletes=())
    return _decide(context, state, why, spec=context.preparation.spec, writes=writes)


def dependencies_not_met(context: Context) -> Decision | None:
    """Wait for the jobs in dependsOn. The workspace is ready by now."""
    unmet = context.unmet_dependencies
    if unmet is None:
        return None
    return _with_workspace(context, unmet.state, unmet.why)


def checkpoints_terminating(context: Context) -> Decision | None:
    """Wait until a PVC that is being deleted is gone, because no new pod can mount it."""
    source = context.preparation.spec.checkpoints
    if source is None or source.existing:
        return None
    why = claims.check_terminating(context.observed.workspace.claims, source.name)
    return None if why is None else _decide_ready(context, State.CLAIM_ENDING, why)


def not_admitted(context: Context) -> Decision | None:
    """Wait for admission by the queue, which may have revoked it."""
    observed = context.observed
    why = admission_status.check_admission(
        observed.job, observed.queue, context.preparation.spec.size
    )
    if why is None:
        return None
    charged_nodes = admission_status.charged(observed.job)
    orphans = find_orphans(observed.gang, observed.refused) if charged_nodes else ()
    if orphans:  # the admission cannot change while they run
        why = Reason("OrphanedWorkers", f"{sentence(why.message)} {orphan_advice(orphans)}")
    was_preempted = admission_status.was_preempted(observed.job.status)
    waits_again = was_preempted and context.next_attempt.cause is None
    state = State.PREEMPTED_WAITING if waits_again else State.ADMISSION_WAITING
    request_reason = Reason(why.reason, "The job requests admission. See the condition Admitted.")
    return _decide_ready(context, state, why, ConditionUpdate(REQUESTED, "True", request_reason))


def nodes_not_read(context: Context) -> Decision | None:
    """Wait for the nodes before a gang whose start depends on them."""
    if not context.awaits_nodes:
        return None
    message = "The controller has not read the nodes yet. The gang is created once it has."
    decision = _decide_ready(context, State.NODES_AWAITED, Reason(NOT_READ, message))
    return replace(decision, writes=decision.writes.and_also(requeue_after=NODES_RETRY))


def unfenced_not_recorded(context: Context) -> Decision | None:
    """Record pods on lost nodes in the status, before the next gang replaces them."""
    if not fence.has_unrecorded(context.observed.job, context.unfenced):
        return None
    message = (
        "The pods on lost nodes are recorded in status.unfenced before the next attempt is created."
    )
    return _decide_ready(context, State.RECORDING_UNFENCED, Reason("Restarting", message))


class NewGang(Struct, frozen=True, kw_only=True):
    """The next gang: its number, its spec with the limits of restarts, and its objects."""

    attempt: int
    spec: ResolvedSpec
    applies: tuple[Apply, ...]
    avoided_nodes: tuple[str, ...]


def gang_refused(context: Context) -> Decision | None:
    """Wait without admission while an object of the next gang is refused."""
    refused, job = context.observed.refused, context.observed.job
    if refused == refusals.NO_REFUSALS:
        return None
    refusal = refusals.find_first(refused, _build_gang(context).applies)
    latest = gang.latest_attempt(job, context.observed.gang)
    refusal = refusal or refusals.find_refused_gang(refused, job, latest)
    return None if refusal is None else _decide_ready(context, *refusal)


def create_gang(context: Context) -> Decision:
    """Create the gang and its Service, PVCs and policies."""
    observed, next_attempt, new_gang = context.observed, context.next_attempt, _build_gang(context)
    child = names.child_job(observed.job.metadata.name, new_gang.attempt)
    why = _why_created(next_attempt, new_gang.spec, child, new_gang.avoided_nodes)
    decision = _decide_ready(context, State.READY, why)
    deletes = (*next_attempt.survivors, *cleanup.delete_oldest_jobs(observed.gang))
    return replace(
        decision,
        attempt=new_gang.attempt,
        history=replace(decision.history, restarts_in_place=0),
        writes=Writes(applies=new_gang.applies, deletes=deletes),
        warning=_rendezvous_fallback(new_gang.spec),
    )


def _build_gang(context: Context) -> NewGang:
    observed, next_attempt = context.observed, context.next_attempt
    assert observed.queue is not None
    spec = context.preparation.spec
    attempt = gang.next_attempt(observed.job, observed.gang, observed.refused)
    # Without reports, the controller could not count the restarts.
    has_reports = bool(context.defaults.progress_url)
    counts = next_attempt.history.counts
    limits = restart_limits(context.reliability, counts) if has_reports else None
    spec = replace(spec, restart_limits=limits)
    causes = () if next_attempt.cause is None else (next_attempt.cause,)
    new_ends = (*next_attempt.history.ends, *causes)
    avoided_nodes = nodes_to_avoid((*observed.job.status.attempts, *new_ends))
    blocking_pods = fence.blocking_pods(
        observed.gang, observed.cluster.nodes, context.unfenced, attempt, context.now
    )
    may_start = gang.has_ended(observed.job, observed.gang) and not blocking_pods
    jobs = build_child_jobs(
        observed,
        spec,
        attempt,
        context.defaults,
        counts=counts,
        previous_end=_cause(next_attempt),
        shrunk_from=next_attempt.size.shrunk_from if next_attempt.size else None,
        may_start=may_start and not _may_be_resumed(context),
        environment=context.preparation.environment,
        avoided_hostnames=hostnames(observed.cluster.nodes, avoided_nodes),
    )
    objects = build_gang_objects(
        observed.job,
        observed.queue,
        observed.cluster.installed,
        spec,
        attempt,
        jobs,
        context.defaults.kai_quota_namespaces,
    )
    applies = (
        *missing_checkpoints(observed.job, observed.workspace, spec),
        *((network.isolation(observed.job),) if observed.queue.spec.networking.isolate else ()),
        *((network.gang_secret(observed.job),) if network.needs_service(spec) else ()),
        *_with_service(observed, spec, objects, jobs),
    )
    return NewGang(attempt=attempt, spec=spec, applies=applies, avoided_nodes=avoided_nodes)


def _may_be_resumed(context: Context) -> bool:
    """Whether one Job may have several gangs of pods, which wait for the end of earlier ones."""
    queue = context.observed.queue
    assert queue is not None
    chosen = choose(queue, context.observed.cluster.installed, context.observed.job)
    return SCHEDULERS[chosen.gang].api.admits_jobs


def _why_created(
    next_attempt: NextAttempt, spec: ResolvedSpec, child: str, avoided_nodes: tuple[str, ...]
) -> Reason:
    if next_attempt.cause is None:
        # Use the message that the next reconcile would write, to save a status update.
        return Reason(STARTING, f"{pods_are(0, spec.size.nodes)} running.")
    if next_attempt.is_resize:
        return Reason(next_attempt.cause.reason, next_attempt.cause.message)
    elsewhere = f", preferably not on {', '.join(avoided_nodes)}" if avoided_nodes else ""
    cause = sentence(next_attempt.cause.message)
    return Reason("Restarting", f"Job {child} is being created{elsewhere}. {cause}")


def _rendezvous_fallback(spec: ResolvedSpec) -> Event | None:
    rendezvous = spec.rendezvous
    if not rendezvous.fallback_from:
        return None
    return Event(
        "Warning",
        "RendezvousFallback",
        f"rdzvBackend {rendezvous.fallback_from} requires distributed.rdzvEndpoint."
        f" {rendezvous.backend} is used instead.",
    )


def _cause(next_attempt: NextAttempt) -> Cause | None:
    cause = next_attempt.cause
    if cause is None:
        return None
    return Cause(**structs.asdict(cause), failure=next_attempt.history.failure)


def _with_service(
    observed: Observed, spec: ResolvedSpec, objects: tuple[Apply, ...], jobs: tuple[Apply, ...]
) -> tuple[Apply, ...]:
    """Return the objects of a gang, which end with its Jobs, and its Service if that is missing.

    Pods need the Service only when they run. So the first gang is created before it; if the Service
    is refused, that gang waits for it (`running.service_refused`). A gang of two Jobs would lose
    the first one then, and a later gang usually has a Service.
    """
    job, present = observed.job, observed.gang
    if present.service is not None or not network.needs_service(spec):
        return objects
    service = network.service(job)
    if len(jobs) > 1 or gang.was_created(job, present):
        return (service, *objects)
    return (*objects, service)


def _decide_ready(
    context: Context, state: State, why: Reason, *conditions: ConditionUpdate
) -> Decision:
    """Return a decision where dependencies and workspace are ready."""
    met_reason = dependencies.describe_met(context.observed.job)
    return _with_workspace(
        context,
        state,
        why,
        *(
            ()
            if met_reason is None
            else (ConditionUpdate(dependencies.CONDITION, "True", met_reason),)
        ),
        *conditions,
    )


def _with_workspace(
    context: Context, state: State, why: Reason, *conditions: ConditionUpdate
) -> Decision:
    """Return a decision where the workspace is ready."""
    preparation = context.preparation
    workspace = ConditionUpdate("WorkspaceReady", "True", preparation.step.why)
    return _decide(
        context,
        state,
        why,
        workspace,
        *conditions,
        spec=preparation.spec,
        commit=preparation.step.commit,
    )


def _decide(
    context: Context,
    state: State,
    why: Reason,
    *conditions: ConditionUpdate,
    spec: ResolvedSpec | None = None,
    commit: str = "",
    writes: Writes = NO_WRITES,
) -> Decision:
    """Return a decision on the next attempt.

    The status has the reason of a resize before the gang is deleted: else it counts as a failure.
    """
    next_attempt = context.next_attempt
    if next_attempt.is_resize:
        writes = replace(writes, status_before_deletes=True)
    return Decision(
        state=state,
        why=why,
        attempt=context.attempt,
        spec=spec,
        conditions=conditions,
        commit=commit,
        history=next_attempt.history,
        writes=writes.and_also(deletes=next_attempt.survivors),
    )
