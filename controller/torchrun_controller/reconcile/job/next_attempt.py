"""The steps towards the next attempt: what is missing for it, cheapest first, and its gang."""

from msgspec import Struct, structs
from msgspec.structs import replace

from torchrun_api import names
from torchrun_controller.reconcile.gang import cleanup, fence, gang
from torchrun_controller.reconcile.gang.failures import CreationCause
from torchrun_controller.reconcile.gang.gang import build_child_jobs
from torchrun_controller.reconcile.gang.gate import find_orphans, orphan_advice
from torchrun_controller.reconcile.gang.restarts import restart_limits
from torchrun_controller.reconcile.gang.state import STARTING
from torchrun_controller.reconcile.job import dependencies, refusals
from torchrun_controller.reconcile.job.assess import (
    Assessment,
    NextAttempt,
    Preparation,
    invalid_spec,
)
from torchrun_controller.reconcile.job.decisions import (
    Decision,
    DecisionWrites,
    Known,
    decide,
    decide_on_next,
)
from torchrun_controller.reconcile.job.running import missing_checkpoints
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import pods_are, sentence
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply, Event
from torchrun_controller.reconcile.model.times import sync_left
from torchrun_controller.reconcile.objects import network
from torchrun_controller.reconcile.placement import hostnames, nodes_to_avoid
from torchrun_controller.reconcile.pods.nodes import NODES_RETRY, NOT_READ
from torchrun_controller.reconcile.schedulers.groups import build_gang_objects
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.admission_status import REQUESTED
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec
from torchrun_controller.reconcile.workspace import claims
from torchrun_controller.reconcile.workspace.helper_pods import SyncState


def _next_attempt(assessment: Assessment) -> NextAttempt:
    """Return the next attempt, for the steps after those of a gang that exists."""
    assert assessment.next_attempt is not None
    return assessment.next_attempt


def _prepared(assessment: Assessment) -> Preparation:
    """Return what the next gang is made of, for the steps after `spec_invalid`."""
    preparation = _next_attempt(assessment).preparation
    assert preparation is not None
    return preparation


def _with_spec(assessment: Assessment) -> Known:
    return Known(spec=_prepared(assessment).spec)


def _with_workspace(assessment: Assessment) -> Known:
    """Return what the status says once the workspace is ready."""
    prepared = _prepared(assessment)
    workspace = ConditionUpdate("WorkspaceReady", "True", prepared.workspace.why)
    return Known(spec=prepared.spec, conditions=(workspace,), commit=prepared.workspace.commit)


def _with_dependencies(assessment: Assessment) -> Known:
    """Return what the status says once workspace and dependencies are ready."""
    known = _with_workspace(assessment)
    met_reason = dependencies.describe_met(assessment.observed.job)
    if met_reason is None:
        return known
    met = ConditionUpdate(dependencies.CONDITION, "True", met_reason)
    return replace(known, conditions=(*known.conditions, met))


def job_invalid(assessment: Assessment) -> Decision | None:
    """Refuse a job that violates its schema."""
    problem = assessment.observed.job.invalid
    if not problem:
        return None
    why = invalid_spec(f"The TorchrunJob is invalid: {problem}")
    return decide_on_next(assessment, State.SPEC_INVALID, why)


def queue_missing(assessment: Assessment) -> Decision | None:
    """Wait for the queue. A queue that is being deleted accepts no new jobs."""
    job, queue = assessment.observed.job, assessment.observed.queue
    is_fixed = gang.was_created(job, assessment.observed.gang)
    if queue is None:
        advice = "it" if is_fixed else "it or choose another queue (kubectl get torchrunqueues)"
        why = Reason(
            "QueueNotFound",
            f"TorchrunQueue {job.spec.job_queue} does not exist in namespace"
            f" {job.metadata.namespace}. Create {advice}.",
        )
        return decide_on_next(assessment, State.QUEUE_MISSING, why)
    if queue.metadata.terminating and not is_fixed:
        why = Reason(
            "QueueTerminating",
            f"TorchrunQueue {queue.metadata.name} is being deleted and accepts no new"
            " jobs. Choose another queue, or create it again.",
        )
        return decide_on_next(assessment, State.QUEUE_MISSING, why)
    return None


def spec_invalid(assessment: Assessment) -> Decision | None:
    """Refuse an invalid spec before preparing a workspace."""
    why = _next_attempt(assessment).spec_problem
    return None if why is None else decide_on_next(assessment, State.SPEC_INVALID, why)


def dependency_failed(assessment: Assessment) -> Decision | None:
    """Fail a job whose dependency has failed, and refuse a cycle."""
    unmet = _next_attempt(assessment).unmet_dependencies
    if unmet is None or unmet.state is State.DEPENDENCY_WAITING:
        return None
    return decide_on_next(assessment, unmet.state, unmet.why, _with_spec(assessment))


def scheduler_missing(assessment: Assessment) -> Decision | None:
    """Wait for the gang scheduler that the queue requests."""
    why = _prepared(assessment).choice.missing
    if why is None:
        return None
    return decide_on_next(assessment, State.SCHEDULER_MISSING, why, _with_spec(assessment))


def workspace_not_ready(assessment: Assessment) -> Decision | None:
    """Prepare the workspace, within syncTimeoutSeconds."""
    step = _prepared(assessment).workspace
    if step.state is SyncState.READY:
        return None
    is_refused = step.state is SyncState.REFUSED
    state, why = State.WORKSPACE_REFUSED if is_refused else State.WORKSPACE_SYNCING, step.why
    writes = DecisionWrites(
        applies=step.applies,
        deletes=step.deletes,
        status_before_deletes=step.status_before_deletes,
        requeue_after=step.requeue_after,
    )
    refusal = refusals.find_first(assessment.observed.refused, writes.applies)
    timeout = assessment.reliability.sync_timeout
    seconds_left = sync_left(assessment.observed.job.status, timeout, assessment.now)
    if refusal is not None:
        (state, why), writes = refusal, DecisionWrites()
    elif timeout is not None and seconds_left is not None and seconds_left <= 0:
        message = f"The workspace was not ready within {timeout.total_seconds():.0f} s"
        why = Reason("SyncTimeout", f"{message} (syncTimeoutSeconds). {why.message}")
        state, writes = State.SYNC_TIMED_OUT, replace(writes, applies=(), deletes=())
    return decide_on_next(assessment, state, why, _with_spec(assessment), writes=writes)


def dependencies_not_met(assessment: Assessment) -> Decision | None:
    """Wait for the jobs in dependsOn. The workspace is ready by now."""
    unmet = _next_attempt(assessment).unmet_dependencies
    if unmet is None:
        return None
    return decide_on_next(assessment, unmet.state, unmet.why, _with_workspace(assessment))


def checkpoints_terminating(assessment: Assessment) -> Decision | None:
    """Wait until a PVC that is being deleted is gone, because no new pod can mount it."""
    source = _prepared(assessment).spec.checkpoints
    if source is None or source.existing:
        return None
    why = claims.check_terminating(assessment.observed.workspace.claims, source.name)
    return (
        None
        if why is None
        else decide_on_next(assessment, State.CLAIM_ENDING, why, _with_dependencies(assessment))
    )


def not_admitted(assessment: Assessment) -> Decision | None:
    """Wait for admission by the queue, which may have revoked it."""
    observed = assessment.observed
    why = admission_status.check_admission(
        observed.job, observed.queue, _prepared(assessment).spec.size
    )
    if why is None:
        return None
    charged_nodes = admission_status.charged(observed.job)
    orphans = find_orphans(observed.gang, observed.refused) if charged_nodes else ()
    if orphans:  # the admission cannot change while they run
        why = Reason("OrphanedWorkers", f"{sentence(why.message)} {orphan_advice(orphans)}")
    was_preempted = admission_status.was_preempted(observed.job.status)
    waits_again = was_preempted and _next_attempt(assessment).cause is None
    state = State.PREEMPTED_WAITING if waits_again else State.ADMISSION_WAITING
    request_reason = Reason(why.reason, "The job requests admission. See the condition Admitted.")
    request = ConditionUpdate(REQUESTED, "True", request_reason)
    return decide_on_next(assessment, state, why, _with_dependencies(assessment), request)


def nodes_not_read(assessment: Assessment) -> Decision | None:
    """Wait for the machines before a gang whose start depends on them.

    Without them, workers of earlier gangs that may still run on lost machines are not seen.
    """
    observed = assessment.observed
    if (
        not observed.cluster.nodes_awaited
        or assessment.reliability.allow_unfenced_restart
        or not gang.was_created(observed.job, observed.gang)
    ):
        return None
    message = "The controller has not read the machines yet. The gang is created once it has."
    return decide_on_next(
        assessment,
        State.NODES_AWAITED,
        Reason(NOT_READ, message),
        _with_dependencies(assessment),
        writes=DecisionWrites(requeue_after=NODES_RETRY),
    )


def unfenced_not_recorded(assessment: Assessment) -> Decision | None:
    """Record pods on lost machines in the status, before the next gang replaces them."""
    if not fence.has_unrecorded(assessment.observed.job, assessment.unfenced):
        return None
    message = (
        "The pods on lost machines are recorded in status.unfenced before the next attempt is"
        " created."
    )
    why = Reason("Restarting", message)
    return decide_on_next(assessment, State.RECORDING_UNFENCED, why, _with_dependencies(assessment))


class NewGang(Struct, frozen=True, kw_only=True):
    """The next gang: its number, its spec with the limits of restarts, and its objects."""

    attempt: int
    spec: ResolvedSpec
    applies: tuple[Apply, ...]
    avoided_nodes: tuple[str, ...]


def gang_refused(assessment: Assessment) -> Decision | None:
    """Wait without admission while an object of the next gang is refused."""
    refused, job = assessment.observed.refused, assessment.observed.job
    if refused == refusals.NO_REFUSALS:
        return None
    new_gang = _build_gang(assessment)
    if isinstance(new_gang, Reason):
        return decide_on_next(assessment, State.SPEC_INVALID, new_gang)
    refusal = refusals.find_first(refused, new_gang.applies)
    latest = gang.latest_attempt(job, assessment.observed.gang)
    refusal = refusal or refusals.find_refused_gang(refused, job, latest)
    if refusal is None:
        return None
    return decide_on_next(assessment, *refusal, _with_dependencies(assessment))


def create_gang(assessment: Assessment) -> Decision:
    """Create the gang and its Service, PVCs and policies."""
    observed, next_attempt = assessment.observed, _next_attempt(assessment)
    new_gang = _build_gang(assessment)
    if isinstance(new_gang, Reason):
        return decide_on_next(assessment, State.SPEC_INVALID, new_gang)
    child = names.child_job(observed.job.metadata.name, new_gang.attempt)
    deletes = (*next_attempt.survivors, *cleanup.delete_oldest_jobs(observed.gang))
    return decide(
        assessment,
        State.READY,
        _why_created(next_attempt, new_gang.spec, child, new_gang.avoided_nodes),
        _with_dependencies(assessment),
        attempt=new_gang.attempt,
        history=replace(next_attempt.history, restarts_in_place=0),
        writes=DecisionWrites(applies=new_gang.applies, deletes=deletes),
        warning=_rendezvous_fallback(new_gang.spec),
    )


def _build_gang(assessment: Assessment) -> NewGang | Reason:
    """Return the next gang, or why none can be built from a spec that is valid otherwise."""
    observed, next_attempt = assessment.observed, _next_attempt(assessment)
    prepared = _prepared(assessment)
    assert observed.queue is not None
    attempt = gang.next_attempt(observed.job, observed.gang, observed.refused)
    # Without reports, the controller could not count the restarts.
    has_reports = bool(assessment.defaults.progress_url)
    counts = next_attempt.history.counts
    limits = restart_limits(assessment.reliability, counts) if has_reports else None
    spec = replace(prepared.spec, restart_limits=limits)
    causes = () if next_attempt.cause is None else (next_attempt.cause,)
    new_ends = (*next_attempt.history.ends, *causes)
    avoided_nodes = nodes_to_avoid((*observed.job.status.attempts, *new_ends))
    blocking_pods = fence.blocking_pods(
        observed.gang, observed.cluster.nodes, assessment.unfenced, attempt, assessment.now
    )
    # A Job that its scheduler suspends may have several gangs of pods, which wait for the end of
    # earlier ones.
    may_be_resumed = SCHEDULERS[prepared.choice.gang].api.admits_jobs
    has_ended = gang.has_ended(observed.job, observed.gang)
    shrunk_from = next_attempt.size.shrunk_from if next_attempt.size else None
    jobs = build_child_jobs(
        observed,
        spec,
        attempt,
        assessment.defaults,
        history=gang.history_annotations(
            observed.job, attempt, counts, _cause(next_attempt), shrunk_from
        ),
        may_start=has_ended and not blocking_pods and not may_be_resumed,
        environment=prepared.environment,
        avoided_hostnames=hostnames(observed.cluster.nodes, avoided_nodes),
    )
    try:
        objects = build_gang_objects(
            observed, spec, attempt, prepared.choice, jobs, assessment.defaults
        )
    except InvalidSpecError as error:
        return invalid_spec(str(error))
    applies = (
        *missing_checkpoints(observed.job, observed.workspace, spec),
        *((network.isolation(observed.job),) if observed.queue.spec.networking.isolate else ()),
        *((network.gang_secret(observed.job),) if network.needs_service(spec) else ()),
        *_with_service(observed, spec, objects, jobs),
    )
    return NewGang(attempt=attempt, spec=spec, applies=applies, avoided_nodes=avoided_nodes)


def _why_created(
    next_attempt: NextAttempt, spec: ResolvedSpec, child: str, avoided_nodes: tuple[str, ...]
) -> Reason:
    if next_attempt.cause is None:
        # Use the message that the next reconcile would write, to save a status update.
        return Reason(STARTING, f"{pods_are(0, spec.size.nodes)} running.")
    if next_attempt.is_replacement:
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


def _cause(next_attempt: NextAttempt) -> CreationCause | None:
    cause = next_attempt.cause
    if cause is None:
        return None
    return CreationCause(**structs.asdict(cause), failure=next_attempt.history.failure)


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
