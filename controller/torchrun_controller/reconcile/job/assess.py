"""What the steps of one reconcile share: one frozen value, computed from top to bottom."""

from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.status import (
    PHASES,
    TERMINAL,
    Attempt,
    LastFailure,
    TorchrunJobStatus,
    UnfencedWorker,
)
from torchrun_api.kinds.unsupported import etcd_without_endpoint
from torchrun_api.names import MOST_GANGS
from torchrun_controller.reconcile.gang import cleanup, departure, elastic, fence, gang, headway
from torchrun_controller.reconcile.gang.checkpoints import find_known
from torchrun_controller.reconcile.gang.elastic import GangSize, Outlook
from torchrun_controller.reconcile.gang.failures import Failure, choose_cause
from torchrun_controller.reconcile.gang.gang import roles_of
from torchrun_controller.reconcile.gang.restarts import (
    INTENDED_ENDS,
    Counts,
    FailureAction,
    NewRestarts,
    RestartDelay,
    describe_edit_wait,
    describe_limit,
    describe_restarts,
    evaluate_failure_policy,
    find_backoff,
    find_new_restarts,
)
from torchrun_controller.reconcile.gang.state import (
    GangState,
    evaluate_state,
    failure_reason,
    find_vanished_gang,
)
from torchrun_controller.reconcile.job import refusals
from torchrun_controller.reconcile.job.dependencies import UnmetDependencies, find_unmet
from torchrun_controller.reconcile.model.conditions import BLOCKED_REASONS, Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import GANG_PHASES, ROWS, Hold, State
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.model.times import (
    end_of_running,
    find_end,
    since_resumption,
    without_future,
)
from torchrun_controller.reconcile.objects import network
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.objects.environment import Environment, environment_of
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.head_and_workers import resumption_of
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, delete_job
from torchrun_controller.reconcile.pods.nodes import describe_mass_silence
from torchrun_controller.reconcile.schedulers.table import Choice, choose
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability, resolve_reliability
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, resolve
from torchrun_controller.reconcile.spec.validation import validate
from torchrun_controller.reconcile.workspace import setup
from torchrun_controller.reconcile.workspace.helper_pods import SyncState, WorkspaceStep
from torchrun_controller.reconcile.workspace.preparation import prepare_next_gang


def invalid_spec(problem: str) -> Reason:
    """Return the reason of a job whose spec is invalid."""
    return Reason("InvalidSpec", sentence(problem))


class History(Struct, frozen=True, kw_only=True):
    """The records of attempts for the status: the new counts, new ends, and the root cause.

    `restarts_in_place` are those of the present attempt.
    """

    restarts_in_place: int = 0
    counts: Counts = Counts()
    ends: tuple[Attempt, ...] = ()
    failure: LastFailure | None = None


class GangEnd(Struct, frozen=True, kw_only=True):
    """The end of the last gang. `history` is what the status records of it.

    `fails_job`: the failure policy allows no other attempt. A recorded end never fails the job: the
    status records an end only if another attempt may follow.
    """

    why: Reason
    fails_job: bool
    attempt: Attempt
    history: History


class Preparation(Struct, frozen=True, kw_only=True):
    """What the next gang is made of, as far as the spec is valid.

    `workspace` is the next step towards a ready workspace, and `spec` has both.
    """

    spec: ResolvedSpec
    choice: Choice
    workspace: WorkspaceStep
    environment: Environment | None


class NextAttempt(Struct, frozen=True, kw_only=True):
    """What the next gang inherits, and what it lacks.

    `cause` is the end that requires another attempt. `survivors` of the last gang are deleted even
    while the next attempt waits. `size` is None for the size of the spec. `preparation` is None
    without a queue, and for an invalid spec; `spec_problem` says why that of a valid job is.
    """

    history: History
    cause: Attempt | None = None
    survivors: tuple[Delete, ...] = ()
    size: GangSize | None = None
    unmet_dependencies: UnmetDependencies | None = None
    spec_problem: Reason | None = None
    preparation: Preparation | None = None

    @property
    def is_replacement(self) -> bool:
        """Whether the last gang has not failed: the next one has another size, or machines."""
        return self.cause is not None and self.cause.reason in gang.REPLACEMENTS


class Assessment(Struct, frozen=True, kw_only=True):
    """One job at one moment. `now` is in UTC with whole seconds, as the API keeps times.

    `observed` has no times in the future, the default endpoint of the rendezvous, and all known
    checkpoints; `last_status` is as the API has it. A job that is deleted, unreadable or finished
    has nothing else.

    Of the last gang: `attempt` is its number, `gang` its state if its Job exists, `ran_until` when
    it ended or was suspended, else now. `blocked` is why an admitted gang needs somebody's action
    to start. `next_attempt` is None while a gang goes on, and if none may follow now.
    """

    observed: Observed
    now: datetime
    defaults: Defaults
    reliability: ResolvedReliability
    last_status: TorchrunJobStatus
    unreadable: str = ""
    attempt: int
    ran_until: datetime
    gang: GangState | None = None
    unfenced: tuple[UnfencedWorker, ...] = ()  # workers that may still run on lost machines
    new_restarts: NewRestarts = NewRestarts()
    history: History = History()
    outlook: Outlook = Outlook()
    missing_service: tuple[Apply, ...] = ()
    service_refusal: tuple[State, Reason] | None = None
    end: GangEnd | None = None
    survivors: tuple[Delete, ...] = ()  # of a gang that has ended
    backoff: RestartDelay | None = None
    blocked: Reason | None = None
    next_attempt: NextAttempt | None = None


def assess(observed: Observed, now: datetime, defaults: Defaults) -> Assessment:
    """Return what the steps share. Does not raise: `NextAttempt` has what is wrong with a spec."""
    policy, last_status = resolve_reliability(observed.job, observed.queue), observed.job.status
    unreadable = _find_unreadable(observed)
    if observed.job.metadata.terminating or unreadable or last_status.phase in TERMINAL:
        return Assessment(
            observed=observed,
            now=now,
            defaults=defaults,
            reliability=policy,
            last_status=last_status,
            unreadable=unreadable,
            attempt=last_status.attempt,
            ran_until=now,
        )
    observed = _correct(observed, now, defaults)
    job, observed_gang, cluster_nodes = observed.job, observed.gang, observed.cluster.nodes
    unfenced = fence.unfenced_workers(job, observed_gang, cluster_nodes, policy, now)
    new_restarts = find_new_restarts(job, observed_gang)

    state = _evaluate_gang(observed, unfenced, new_restarts, now)
    if state is None:
        attempt = job.status.attempt
        stopped = end_of_running(job.status, find_end(job.status.attempts, attempt))
    else:
        attempt = attempt_of(observed_gang.current_job)
        stopped = state.stopped
    ran_until = now if stopped is None else min(stopped, now)
    history = _history(observed, state, new_restarts)
    outlook = Outlook()
    if state is not None and state.failure is None:
        outlook = elastic.evaluate_size(observed, state.state, now)
    missing_service, service_refusal = _find_missing_service(observed, state)

    end = _find_end(observed, now, policy, state, outlook, history, ran_until)
    has_ended = state is None or end is not None
    survivors = _survivors(observed, state, end, unfenced) if has_ended else ()
    backoff = None
    if end is not None:
        rounds = [each for each in history.ends if each.round is not None]
        backoff = find_backoff((*job.status.attempts, *rounds), end.attempt, now)
    blocked = None
    if state is not None and end is None and admission_status.charged(job):
        waiting, why = service_refusal or (state.state, state.why)
        is_kept = ROWS[waiting].admission is Hold.KEPT
        blocked = None if is_kept or why.reason not in BLOCKED_REASONS else why

    next_attempt = None
    is_stopped = job.spec.suspend or admission_status.preempted(job)
    may_follow = backoff is None and (end is None or not end.fails_job)
    if has_ended and may_follow and not is_stopped:
        next_attempt = _assess_next(
            observed, now, defaults, state, outlook, history, end, survivors
        )
    return Assessment(
        observed=observed,
        now=now,
        defaults=defaults,
        reliability=policy,
        last_status=last_status,
        attempt=attempt,
        gang=state,
        ran_until=ran_until,
        unfenced=unfenced,
        new_restarts=new_restarts,
        history=history,
        outlook=outlook,
        missing_service=missing_service,
        service_refusal=service_refusal,
        end=end,
        survivors=survivors,
        backoff=backoff,
        blocked=blocked,
        next_attempt=next_attempt,
    )


def _find_unreadable(observed: Observed) -> str:
    """Return what a newer version wrote and this one cannot read; "" if the job is readable."""
    job = observed.job
    has_run = job.status.workers is not None or bool(observed.gang.child_jobs)
    if job.incomplete or (job.invalid and has_run):
        return job.invalid
    is_known = job.status.phase is None or job.status.phase in PHASES
    return "" if is_known else f"status.phase is {job.status.phase}"


def _correct(observed: Observed, now: datetime, defaults: Defaults) -> Observed:
    """Return the observed job with what follows from all of it.

    It has no times in the future, the default endpoint, and in the gang all checkpoints that
    anything shows.
    """
    job, queue = without_future(observed.job, now), observed.queue
    observed_gang = replace(observed.gang, checkpoints=find_known(job.status, observed.gang))
    if gang.exists(job, observed.gang) and not observed.gang.current_job.spec.suspend:
        job = since_resumption(job, resumption_of(observed.gang), now)
    if (
        queue is not None
        and defaults.etcd_endpoint
        and etcd_without_endpoint(job.spec, queue.spec) is not None
    ):
        distributed = replace(queue.spec.distributed, rdzv_endpoint=defaults.etcd_endpoint)
        queue = replace(queue, spec=replace(queue.spec, distributed=distributed))
    return replace(observed, job=job, queue=queue, gang=observed_gang)


def _evaluate_gang(
    observed: Observed,
    unfenced: tuple[UnfencedWorker, ...],
    new_restarts: NewRestarts,
    now: datetime,
) -> GangState | None:
    """Return the state of the gang of the present attempt; None if its Job does not exist."""
    job, observed_gang = observed.job, observed.gang
    if not gang.exists(job, observed_gang):
        return None
    state = evaluate_state(observed, unfenced, now)
    if state.state is not State.GANG_RUNNING:
        return state
    why = describe_edit_wait(observed_gang) or state.why
    notes = describe_restarts(job, observed_gang, new_restarts)
    notes += describe_mass_silence(observed.cluster.nodes, observed_gang.workers)
    return replace(state, why=Reason(why.reason, why.message + notes))


def _history(observed: Observed, state: GangState | None, restarts: NewRestarts) -> History:
    """Return the counts, and the failures and earlier ends that the status has not recorded yet."""
    job, observed_gang = observed.job, observed.gang
    counts = gang.current_counts(job, observed_gang)
    if state is None:
        return History(counts=counts, restarts_in_place=job.status.restarts_in_place)
    failure = restarts.failure if state.failure is None else state.failure.details
    return History(
        counts=counts.after_rounds(restarts.new),
        restarts_in_place=restarts.total,
        ends=(*gang.unrecorded_ends(job, observed_gang), *restarts.ends),
        failure=failure or gang.unrecorded_failure(job, observed_gang),
    )


def _find_missing_service(
    observed: Observed, state: GangState | None
) -> tuple[tuple[Apply, ...], tuple[State, Reason] | None]:
    """Return the Service of the present gang if it does not exist, and why it is refused.

    Only a new gang waits for that, whose pods cannot find each other. An older one has had a
    Service when its status was written.
    """
    job, observed_gang = observed.job, observed.gang
    if state is None or observed_gang.service is not None:
        return (), None
    if head_and_workers.nodes_of(observed_gang.current_job) == 1:
        return (), None
    service = (network.service(job),)
    is_recorded = job.status.workers is not None and job.status.phase in GANG_PHASES
    if is_recorded or state.state not in (State.GANG_STARTING, State.GANG_RUNNING):
        return service, None
    return service, refusals.find_first(observed.refused, service)


def _find_end(
    observed: Observed,
    now: datetime,
    policy: ResolvedReliability,
    state: GangState | None,
    outlook: Outlook,
    history: History,
    ran_until: datetime,
) -> GangEnd | None:
    """Return why the last gang has ended, or has to for another size; None if it goes on.

    A recorded end stays: later failures are secondary.
    """
    job, observed_gang = observed.job, observed.gang
    if state is None:
        vanished = find_vanished_gang(job, now)
        if vanished is not None:
            failure, attempt = vanished
            why = failure_reason(failure.details)
            return _end_by_policy(job, policy, why, failure, attempt, history)
        end = find_end(job.status.attempts, job.status.attempt)
        if end is None:
            return None
        why = Reason(end.reason, end.message)
        return GangEnd(why=why, fails_job=False, attempt=end, history=history)

    end = find_end(job.status.attempts, attempt_of(observed_gang.current_job))
    if state.failure is not None and end is None:
        node = state.failure.details.node
        end = gang.record_end(
            job, observed_gang, state.why, now, ran_until=ran_until, counted=False, node=node
        )
        return _end_by_policy(job, policy, state.why, state.failure, end, history)
    if state.failure is not None and end is not None:
        cause = job.status.last_failure
        if end.reason not in gang.REPLACEMENTS:
            cause = choose_cause(cause, state.failure.details)
        history = replace(history, ends=(*history.ends, end), failure=cause)
        return GangEnd(why=state.why, fails_job=False, attempt=end, history=history)

    if end is None or end.reason not in gang.REPLACEMENTS:
        stagnation = _find_stagnation_in_place(observed, policy, state, history)
        if stagnation is not None:
            end = gang.record_end(
                job, observed_gang, stagnation, now, ran_until=ran_until, counted=False
            )
            return GangEnd(why=stagnation, fails_job=True, attempt=end, history=history)
        leaving = None
        if outlook.why is None and not policy.never_restart and _is_going_on(state):
            leaving = departure.find_departure(observed)
        replacement = outlook.why if leaving is None else leaving.why
        if replacement is None:
            return None
        machine = ""
        if leaving is not None:
            machine = leaving.machine
            history = replace(history, counts=history.counts.after(FailureAction.IGNORE))
        end = gang.record_end(
            job, observed_gang, replacement, now, ran_until=ran_until, counted=False, node=machine
        )
    return GangEnd(
        why=Reason(end.reason, end.message),
        fails_job=False,
        attempt=end,
        history=replace(history, ends=(*history.ends, end)),
    )


def _is_going_on(state: GangState) -> bool:
    """Whether the pods of the gang run, or start."""
    return state.state in (State.GANG_STARTING, State.GANG_RUNNING)


def _find_stagnation_in_place(
    observed: Observed, policy: ResolvedReliability, state: GangState, history: History
) -> Reason | None:
    """Return why a gang that runs should end: its rounds, and those before, got no further.

    The launchers have started another round by then. If that got further, the gang goes on.
    """
    job, observed_gang = observed.job, observed.gang
    ends = (*job.status.attempts, *history.ends)
    number = attempt_of(observed_gang.current_job)
    rounds = [end for end in ends if end.number == number]
    if state.state is not State.GANG_RUNNING or not rounds:
        return None
    start = headway.ranks_start(job.status, observed_gang, ends)
    step = headway.newest_step(job.status, observed_gang.progress, start)
    saved = headway.newest_saved(observed_gang)
    present = Attempt(number=number, round=MOST_GANGS, step=step, checkpoint_step=saved)
    return headway.find_stagnation(job.status, (*history.ends, present), policy.idle_attempts)


def _end_by_policy(
    job: TorchrunJob,
    policy: ResolvedReliability,
    why: Reason,
    failure: Failure,
    attempt: Attempt,
    history: History,
) -> GangEnd:
    """Return a new end with its history; the counts of a job that fails stay as they are."""
    history = replace(history, failure=failure.details)
    action = evaluate_failure_policy(failure, policy, history.counts)
    if action is FailureAction.FAIL:
        why = Reason(why.reason, why.message + describe_limit(failure, policy))
        return GangEnd(why=why, fails_job=True, attempt=attempt, history=history)
    attempt = replace(attempt, counted=action is FailureAction.RESTART)
    ends = (*history.ends, attempt)
    stagnation = headway.find_stagnation(job.status, ends, policy.idle_attempts)
    if stagnation is not None:
        return GangEnd(why=stagnation, fails_job=True, attempt=attempt, history=history)
    history = replace(history, counts=history.counts.after(action), ends=ends)
    return GangEnd(why=why, fails_job=False, attempt=attempt, history=history)


def _survivors(
    observed: Observed,
    state: GangState | None,
    end: GangEnd | None,
    unfenced: tuple[UnfencedWorker, ...],
) -> tuple[Delete, ...]:
    """Return the deletions of what still runs of a gang that has ended."""
    job, observed_gang = observed.job, observed.gang
    if not observed_gang.child_jobs:
        return ()
    if state is not None and state.failure is None and end is not None and not end.fails_job:
        # Only a gang that never ran completely has no checkpoint to save.
        shrinks = end.why.reason == gang.SHRINKING
        pods = cleanup.end_survivors(job, observed_gang) if shrinks else ()
        return (*pods, delete_job(observed_gang.current_job))
    survivors = cleanup.end_survivors(job, observed_gang)
    return (*survivors, *cleanup.delete_head_job(job, observed_gang, unfenced))


def _assess_next(
    observed: Observed,
    now: datetime,
    defaults: Defaults,
    state: GangState | None,
    outlook: Outlook,
    history: History,
    end: GangEnd | None,
    survivors: tuple[Delete, ...],
) -> NextAttempt:
    """Return what the next gang inherits from the last one, if there was one, and what it lacks.

    Dependencies do not matter any more once there was a gang.
    """
    job, queue, cause = observed.job, observed.queue, None
    last_gang = None if state is None else observed.gang
    size = outlook.size or elastic.size_of_next_gang(observed, last_gang, now)
    if end is not None and (state is not None or end.attempt.reason not in INTENDED_ENDS):
        cause = end.attempt
    unmet_dependencies, preparation, spec_problem = None, None, None
    if not gang.was_created(job, observed.gang):
        unmet_dependencies = find_unmet(job, observed.parents, observed.waits_for)
    if queue is not None and not job.invalid:
        try:
            preparation = _prepare(observed, queue, now, defaults, size)
        except InvalidSpecError as error:
            spec_problem = invalid_spec(str(error))
    return NextAttempt(
        history=history if end is None else end.history,
        cause=cause,
        survivors=survivors,
        size=size,
        unmet_dependencies=unmet_dependencies,
        spec_problem=spec_problem,
        preparation=preparation,
    )


def _prepare(
    observed: Observed,
    queue: TorchrunQueue,
    now: datetime,
    defaults: Defaults,
    size: GangSize | None,
) -> Preparation:
    """Return the spec of the next gang, its scheduler, and the next step of its workspace.

    The rules apply to what is new: a spec that had a gang restarts as it is.

    Raises:
        InvalidSpecError: the spec of job or queue is invalid.
    """
    job = observed.job
    if queue.invalid:
        raise InvalidSpecError(f"TorchrunQueue {queue.metadata.name} is invalid: {queue.invalid}")
    if gang.has_new_spec(job, observed.gang):
        validate(job, queue)
    spec = resolve(job, queue)
    if size is not None:
        spec = replace(spec, size=replace(spec.size, nodes=size.nodes))
    for role in roles_of(spec):
        worker_template(job, queue, spec, None, 0, "", defaults, role)
    choice = choose(queue, observed.cluster.installed, job)
    workspace = prepare_next_gang(observed, spec.workspace, now, defaults)
    if workspace.served is not None:
        assert spec.workspace is not None
        spec = replace(spec, workspace=replace(spec.workspace, served=workspace.served))
    environment = environment_of(spec, workspace.content)
    if environment is not None and workspace.state is SyncState.READY:
        workspace = setup.prepare(observed, spec, environment, now, defaults, workspace)
    return Preparation(spec=spec, choice=choice, workspace=workspace, environment=environment)
