"""The values that the steps of one reconcile share. Each is computed at its first use."""

from datetime import datetime
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.queue import TorchrunQueue
from torchrun_api.status import Attempt, UnfencedWorker
from torchrun_api.unsupported import etcd_without_endpoint
from torchrun_controller.reconcile.gang import cleanup, elastic, fence, gang
from torchrun_controller.reconcile.gang.decision import History
from torchrun_controller.reconcile.gang.elastic import GangSize, Outlook
from torchrun_controller.reconcile.gang.failures import Failure, choose_cause
from torchrun_controller.reconcile.gang.restarts import (
    INTENDED_ENDS,
    FailureAction,
    NewRestarts,
    RestartDelay,
    describe_edit_wait,
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
from torchrun_controller.reconcile.job.dependencies import UnmetDependencies, find_unmet
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.model.times import (
    end_of_running,
    find_end,
    since_resumption,
    without_future,
)
from torchrun_controller.reconcile.objects.environment import Environment, environment_of
from torchrun_controller.reconcile.pods.head_and_workers import resumption_of
from torchrun_controller.reconcile.pods.lifecycle import attempt_of, delete_job
from torchrun_controller.reconcile.pods.nodes import describe_mass_silence
from torchrun_controller.reconcile.spec.reliability import resolve_reliability
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec, resolve
from torchrun_controller.reconcile.workspace import preparation, setup
from torchrun_controller.reconcile.workspace.helper_pods import SyncState, Workspace


class GangEnd(Struct, frozen=True, kw_only=True):
    """The end of the last gang. `history` is what the status records of it.

    `fails_job`: the failure policy allows no other attempt. A recorded end never fails the job: the
    status records an end only if another attempt may follow.
    """

    why: Reason
    fails_job: bool
    attempt: Attempt
    history: History


class NextAttempt(Struct, frozen=True, kw_only=True):
    """What the next gang inherits: the counts, the end of the last gang, and the size.

    `size` is None for the size of the spec. `cause` is the end that requires another attempt.
    `survivors` are deleted even while the next attempt waits.
    """

    history: History
    cause: Attempt | None = None
    size: GangSize | None = None
    survivors: tuple[Delete, ...] = ()

    @property
    def is_resize(self) -> bool:
        """Whether the last gang ends only because the next one has another size."""
        return self.cause is not None and self.cause.reason in gang.RESIZES


class Preparation(Struct, frozen=True, kw_only=True):
    """The next step of the workspace, its environment, and the spec with both."""

    step: Workspace
    spec: ResolvedSpec
    environment: Environment | None


def _with_endpoint(queue: TorchrunQueue, endpoint: str) -> TorchrunQueue:
    """Return the queue with this endpoint of the rendezvous, unless it is empty."""
    if not endpoint:
        return queue
    distributed = replace(queue.spec.distributed, rdzv_endpoint=endpoint)
    return replace(queue, spec=replace(queue.spec, distributed=distributed))


class Context:
    """One job at one moment. `now` is in UTC with whole seconds, as the API keeps times."""

    def __init__(self, observed: Observed, now: datetime, defaults: Defaults) -> None:
        job = without_future(observed.job, now)
        if gang.exists(job, observed.gang) and not observed.gang.current_job.spec.suspend:
            job = since_resumption(job, resumption_of(observed.gang), now)
        queue = observed.queue
        if queue is not None and etcd_without_endpoint(job.spec, queue.spec):
            queue = _with_endpoint(queue, defaults.etcd_endpoint)
        self.observed = replace(observed, job=job, queue=queue)
        self.now = now
        self.defaults = defaults
        self.reliability = resolve_reliability(observed.job, observed.queue)

    @cached_property
    def gang(self) -> GangState | None:
        """The state of the gang of the present attempt; None if its Job does not exist."""
        if not gang.exists(self.observed.job, self.observed.gang):
            return None
        job, observed_gang = self.observed.job, self.observed.gang
        state = evaluate_state(self.observed, self.unfenced, self.now)
        if state.state is not State.GANG_RUNNING:
            return state
        why = describe_edit_wait(observed_gang) or state.why
        notes = describe_restarts(job, observed_gang, self.new_restarts)
        notes += describe_mass_silence(self.observed.cluster.nodes, observed_gang.workers)
        return replace(state, why=Reason(why.reason, why.message + notes))

    @property
    def ran_until(self) -> datetime:
        """Until when the last gang has run: when it ended or was suspended, else now.

        The status has the end of a gang whose Job the controller has deleted.
        """
        status = self.observed.job.status
        if self.gang is None:
            stopped = end_of_running(status, find_end(status.attempts, status.attempt))
        else:
            stopped = self.gang.stopped
        return self.now if stopped is None else min(stopped, self.now)

    @property
    def attempt(self) -> int:
        """The number of the last gang. Its Job has it even if no status was written since."""
        if self.gang is None:
            return self.observed.job.status.attempt
        return attempt_of(self.observed.gang.current_job)

    @property
    def awaits_nodes(self) -> bool:
        """Whether the next gang needs the nodes, which the controller does not know yet.

        Without them it does not see workers of earlier gangs that may still run on lost nodes.
        """
        return (
            self.observed.cluster.nodes_awaited
            and not self.reliability.allow_unfenced_restart
            and gang.was_created(self.observed.job, self.observed.gang)
        )

    @cached_property
    def unfenced(self) -> tuple[UnfencedWorker, ...]:
        """The workers that may still run on lost nodes, in the status or not."""
        observed, nodes = self.observed, self.observed.cluster.nodes
        return fence.unfenced_workers(
            observed.job, observed.gang, nodes, self.reliability, self.now
        )

    @cached_property
    def history(self) -> History:
        """The counts, and the failures and earlier ends that the status has not recorded yet."""
        job, observed_gang = self.observed.job, self.observed.gang
        counts = gang.current_counts(job, observed_gang)
        if self.gang is None:
            return History(counts=counts, restarts_in_place=job.status.restarts_in_place)
        restarts, end = self.new_restarts, self.gang.failure
        failure = end.details if end is not None else restarts.failure
        return History(
            counts=counts.after_rounds(restarts.new),
            restarts_in_place=restarts.total,
            ends=(*gang.unrecorded_ends(job, observed_gang), *restarts.ends),
            failure=failure or gang.unrecorded_failure(job, observed_gang),
        )

    @cached_property
    def new_restarts(self) -> NewRestarts:
        """The restarts in place that the status does not have."""
        return find_new_restarts(self.observed.job, self.observed.gang)

    @cached_property
    def end(self) -> GangEnd | None:
        """Why the last gang has ended, or has to for another size; None if it goes on."""
        observed, now = self.observed, self.now
        if self.gang is not None:
            failure = self.gang.failure
            if failure is None:
                return self._end_of_resize()
            return self._end_of_failure(self.gang, failure)
        vanished = find_vanished_gang(observed.job, now)
        if vanished is not None:
            failure, attempt = vanished
            why = failure_reason(failure.details)
            return self._build_end(why, failure, attempt)
        status = observed.job.status
        recorded_end = find_end(status.attempts, status.attempt)
        if recorded_end is None:
            return None
        why = Reason(recorded_end.reason, recorded_end.message)
        return GangEnd(why=why, fails_job=False, attempt=recorded_end, history=self.history)

    def _end_of_resize(self) -> GangEnd | None:
        """Return the end of a gang that is to have another size. A recorded end stays."""
        job, observed_gang, why = self.observed.job, self.observed.gang, self.outlook.why
        end = find_end(job.status.attempts, attempt_of(observed_gang.current_job))
        if end is None or end.reason not in gang.RESIZES:
            if why is None:
                return None
            end = gang.record_end(
                job, observed_gang, why, self.now, ran_until=self.ran_until, counted=False
            )
        return GangEnd(
            why=Reason(end.reason, end.message),
            fails_job=False,
            attempt=end,
            history=replace(self.history, ends=(*self.history.ends, end)),
        )

    def _end_of_failure(self, state: GangState, failure: Failure) -> GangEnd:
        """Return the end of a failed gang. A recorded end stays: later failures are secondary."""
        observed, why = self.observed, state.why
        number = attempt_of(observed.gang.current_job)
        recorded_end = find_end(observed.job.status.attempts, number)
        if recorded_end is not None:
            cause = observed.job.status.last_failure
            if recorded_end.reason not in gang.RESIZES:
                cause = choose_cause(cause, failure.details)
            history = replace(self.history, ends=(*self.history.ends, recorded_end), failure=cause)
            return GangEnd(why=why, fails_job=False, attempt=recorded_end, history=history)
        node = failure.details.node
        attempt = gang.record_end(
            observed.job,
            observed.gang,
            why,
            self.now,
            ran_until=self.ran_until,
            counted=False,
            node=node,
        )
        return self._build_end(why, failure, attempt)

    def _build_end(self, why: Reason, failure: Failure, attempt: Attempt) -> GangEnd:
        """Return the end with its history; the counts of a job that fails stay as they are."""
        history = replace(self.history, failure=failure.details)
        action = evaluate_failure_policy(failure, self.reliability, history.counts)
        if action is FailureAction.FAIL:
            return GangEnd(why=why, fails_job=True, attempt=attempt, history=history)
        attempt = replace(attempt, counted=action is FailureAction.RESTART)
        history = replace(
            history, counts=history.counts.after(action), ends=(*history.ends, attempt)
        )
        return GangEnd(why=why, fails_job=False, attempt=attempt, history=history)

    @cached_property
    def survivors(self) -> tuple[Delete, ...]:
        """The deletions of pods and Jobs that still run of a gang that has ended."""
        job, observed_gang = self.observed.job, self.observed.gang
        if not observed_gang.child_jobs:
            return ()
        if self.gang is not None and self.gang.failure is None and self.end is not None:
            # Only a gang that never ran completely has no checkpoint to save.
            shrinks = self.end.why.reason == gang.SHRINKING
            pods = cleanup.end_survivors(job, observed_gang) if shrinks else ()
            return (*pods, delete_job(observed_gang.current_job))
        survivors = cleanup.end_survivors(job, observed_gang)
        return (*survivors, *cleanup.delete_head_job(job, observed_gang, self.unfenced))

    @cached_property
    def backoff(self) -> RestartDelay | None:
        """The delay after the last gang; None once it is over, or if there is none."""
        if self.end is None:
            return None
        recorded_ends = self.observed.job.status.attempts
        new_rounds = [end for end in self.history.ends if end.round is not None]
        return find_backoff((*recorded_ends, *new_rounds), self.end.attempt, self.now)

    @cached_property
    def outlook(self) -> Outlook:
        """Whether a running gang is to be resized."""
        assert self.gang is not None
        return elastic.evaluate_size(self.observed, self.gang.state, self.now)

    @cached_property
    def next_attempt(self) -> NextAttempt:
        """What the next gang inherits from the last one, if there was one."""
        last_gang = None if self.gang is None else self.observed.gang
        size = elastic.size_of_next_gang(self.observed, last_gang, self.now)
        if self.end is None:
            return NextAttempt(history=self.history, size=size, survivors=self.survivors)
        if self.gang is not None and self.gang.failure is None:
            size = self.outlook.size or size
        end = self.end.attempt
        return NextAttempt(
            history=self.end.history,
            cause=end if self.gang is not None or end.reason not in INTENDED_ENDS else None,
            size=size,
            survivors=self.survivors,
        )

    @cached_property
    def unmet_dependencies(self) -> UnmetDependencies | None:
        """Why the first gang waits for other jobs, or never starts; None for a later gang."""
        job = self.observed.job
        if gang.was_created(job, self.observed.gang):
            return None
        return find_unmet(job, self.observed.parents, self.observed.waits_for)

    @cached_property
    def spec(self) -> ResolvedSpec:
        """The resolved spec of the next gang."""
        assert self.observed.queue is not None
        spec = resolve(self.observed.job, self.observed.queue)
        size = self.next_attempt.size
        return spec if size is None else replace(spec, size=replace(spec.size, nodes=size.nodes))

    @cached_property
    def preparation(self) -> Preparation:
        """The next step towards a ready workspace."""
        observed, now, spec = self.observed, self.now, self.spec
        step = preparation.prepare_next_gang(observed, spec.workspace, now, self.defaults)
        if step.served is not None:
            assert spec.workspace is not None
            spec = replace(spec, workspace=replace(spec.workspace, served=step.served))
        environment = environment_of(spec, step.content)
        if environment is not None and step.state is SyncState.READY:
            step = setup.prepare(observed, spec, environment, now, self.defaults, step)
        return Preparation(step=step, spec=spec, environment=environment)
