"""Whether a gang goes on without its lost pods, and what the status records of them."""

from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from torchrun_api.job import TorchrunJob
from torchrun_api.status import Attempt, LastFailure, TorchrunJobStatus
from torchrun_controller.reconcile.gang import peer_loss
from torchrun_controller.reconcile.gang.failures import Failure, find_root_cause, precedence
from torchrun_controller.reconcile.gang.gang import STARTING, GangState, failed_state
from torchrun_controller.reconcile.gang.replacement import (
    Losses,
    find_open_records,
    recorded_uids,
    select_open_records,
    to_record,
)
from torchrun_controller.reconcile.gang.restarts import (
    Counts,
    FailureAction,
    evaluate_failure_policy,
)
from torchrun_controller.reconcile.model.attempts import find_end, identity_of, order_of
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import list_names, sentence
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Event
from torchrun_controller.reconcile.model.times import seconds_of_gang
from torchrun_controller.reconcile.pods.lifecycle import attempt_of
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability

REPLACING = "ReplacingPods"
_GOING_ON = frozenset({State.GANG_STARTING, State.GANG_RUNNING})


class CountedLosses(Struct, frozen=True, kw_only=True):
    """The ends of lost pods that the status does not have, with the new counts.

    `failure` is the root cause among them. `fails_job`: the failure policy allows no restart.
    """

    ends: tuple[Attempt, ...] = ()
    counts: Counts = Counts()
    failure: LastFailure | None = None
    fails_job: bool = False


def count_losses(
    job: TorchrunJob,
    gang: ObservedGang,
    losses: Losses,
    policy: ResolvedReliability,
    counts: Counts,
    now: datetime,
) -> CountedLosses:
    """Return the new ends of lost pods, each with the action of the failure policy."""
    seconds = seconds_of_gang(job.status, min(losses.since or now, now))
    together = list(find_open_records(job, gang))
    new = sorted(losses.new, key=lambda loss: precedence(loss.failure.details))
    ends = []
    for loss in new:
        counted = count_once(loss.failure, policy, counts, together)
        if counted.fails_job:
            return CountedLosses(counts=counts, fails_job=True)
        counts = counted.counts
        ends.append(to_record(loss, now, seconds, counted=counted.is_restart))
        together.append(ends[-1])
    failure = new[0].failure.details if new else None
    return CountedLosses(ends=tuple(ends), counts=counts, failure=failure)


class CountedFailure(Struct, frozen=True, kw_only=True):
    """The new counts after a failure, and whether it adds a restart.

    `fails_job`: the failure policy allows no restart; the counts are those of before.
    """

    counts: Counts
    is_restart: bool = False
    fails_job: bool = False


def count_once(
    failure: Failure, policy: ResolvedReliability, counts: Counts, together: Sequence[Attempt]
) -> CountedFailure:
    """Count a failure, given the recorded losses since the last start of a round.

    These losses and the failure count once together, as the failures of the pods of a gang do.
    """
    is_counted = any(end.counted for end in together)
    # The restart that counts already may be the last one.
    before = Counts(counts.restarts - 1, counts.disruptions) if is_counted else counts
    action = evaluate_failure_policy(failure, policy, before)
    if action is FailureAction.FAIL:
        return CountedFailure(counts=counts, fails_job=True)
    is_restart = action is FailureAction.RESTART and not is_counted
    adds = is_restart or not together
    return CountedFailure(counts=counts.after(action) if adds else counts, is_restart=is_restart)


def review(state: GangState, losses: Losses | None, *, fails_job: bool, now: datetime) -> GangState:
    """Return the state of a gang that replaces pods; `state` is the state without replacement.

    `fails_job`: the failure policy allows no restart after the loss of a pod.
    """
    may_go_on = state.state in _GOING_ON or state.state is State.GANG_FAILED
    if losses is None or not may_go_on:
        return state
    if not losses.goes_on or fails_job:
        return _end(state, losses)
    if not losses.pending or state.seconds_left is not None:
        return state
    deadline = losses.deadline
    seconds_left = None if deadline is None else (deadline - now).total_seconds()
    why = _why(state, losses)
    return GangState(State.GANG_STARTING, why, seconds_left=seconds_left, stopped=losses.since)


def _end(state: GangState, losses: Losses) -> GangState:
    """Return the state of a gang that ends. Where pods have lost their peers, the loss is why."""
    failure = state.failure
    if failure is None and state.seconds_left is None:
        failure = losses.problem or losses.peer_cause
    elif failure is not None and peer_loss.is_secondary(failure.details):
        failure = losses.peer_cause or failure
    if failure is None:
        return state
    return failed_state(failure)


def _why(state: GangState, losses: Losses) -> Reason:
    """Return why the gang waits: what its new pods wait for, else that lost pods are replaced."""
    pod_names = list_names(pod.metadata.name for pod in losses.pending)
    message = f"The other pods wait for the replacement of lost pods: {pod_names}."
    if losses.peer_cause is not None and not losses.peer_cause.is_counted:
        message += f" {sentence(losses.peer_cause.details.message)}"
    if state.state is not State.GANG_STARTING:
        return Reason(REPLACING, message)
    is_usual = state.why.reason in (STARTING, "Restarting")
    return Reason(
        REPLACING if is_usual else state.why.reason, f"{sentence(state.why.message)} {message}"
    )


def review_recorded(state: GangState, job: TorchrunJob, gang: ObservedGang) -> GangState:
    """Return the state of a gang whose end the status has: it stays ended.

    New pods of its Job may run before the Job controller stops them.
    """
    child = gang.current_job
    end = find_end(job.status.attempts, attempt_of(child))
    is_over = end is not None and bool(child.metadata.annotations.pod_replacement)
    if end is None or not is_over or state.state not in _GOING_ON:
        return state
    details = LastFailure(node=end.node, reason=end.reason, message=end.message, time=end.end_time)
    failure = Failure(details=details, disruption=True, is_counted=True)
    return GangState(State.GANG_FAILED, Reason(end.reason, end.message), failure)


def choose_cause(recorded: LastFailure | None, later: LastFailure) -> LastFailure:
    """Return the later failure of a gang that has ended, if it is a better root cause.

    The loss of a peer never is.
    """
    if recorded is None:
        return later
    is_better = precedence(later) < precedence(recorded)
    return later if is_better and not peer_loss.is_secondary(later) else recorded


def find_late_cause(job: TorchrunJob, gang: ObservedGang) -> LastFailure | None:
    """Return the root cause that the pods of a gang show which has ended; None for none.

    The pods that the status has as lost are no cause: their loss has not ended the gang.
    """
    lost = recorded_uids(job, gang) if gang.child_jobs else frozenset()
    failure = find_root_cause(tuple(pod for pod in gang.workers if pod.metadata.uid not in lost))
    return None if failure is None else choose_cause(job.status.last_failure, failure.details)


def loss_events(before: TorchrunJobStatus, composed: TorchrunJobStatus) -> tuple[Event, ...]:
    """Return an event for each pod that the new status records as lost."""
    known = {identity_of(end) for end in before.attempts}
    return tuple(
        Event(
            "Warning",
            "PodLost",
            f"A pod of attempt {end.number} is replaced alone. {sentence(end.message)}",
        )
        for end in composed.attempts
        if end.lost_pod is not None and identity_of(end) not in known
    )


def keep_ends(
    recorded_ends: tuple[Attempt, ...], new_ends: tuple[Attempt, ...], gang: ObservedGang, most: int
) -> tuple[Attempt, ...]:
    """Return the last ends of attempts, rounds and lost pods, each as it was first recorded.

    At most `most` are kept. Those of lost pods stay until the pods that replace them may start.
    """
    by_identity = {identity_of(end): end for end in (*new_ends, *recorded_ends)}
    ends = sorted(by_identity.values(), key=order_of)
    needed = select_open_records(gang, ends)
    others = [end for end in ends if end not in needed]
    return tuple(sorted((*needed, *others[-(most - len(needed)) :]), key=order_of))
