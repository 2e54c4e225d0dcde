"""The state of the gang of the present attempt: it succeeded, failed, starts, runs or is suspended.

A user may delete the child Job. The gang ends then, and that is no separate failure. A
foreground deletion ends only with the last pod, and the pods of a lost machine never end. Nothing
waits for it: the next gang is created, and its gate waits for the pods as after any other end.

Kueue or a user may suspend the child Job. It creates the new pods of its resumption in the same
attempt, so they have no epoch of their own by which their launchers could fence a worker on a lost
machine. The attempt ends, and the next one fences it.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from torchrun_api import names
from torchrun_api.kinds.core import Job, Node
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import Attempt, LastFailure, UnfencedWorker
from torchrun_controller.reconcile.gang import gate
from torchrun_controller.reconcile.gang.failures import (
    POD_DELETED,
    Failure,
    failure_of_job,
    find_root_cause,
    node_failure,
    peer_wait_left,
    pods_wait_left,
)
from torchrun_controller.reconcile.gang.gang import find_completed_job, is_recorded
from torchrun_controller.reconcile.gang.headway import newest_step
from torchrun_controller.reconcile.gang.restarts import INTENDED_ENDS
from torchrun_controller.reconcile.model.conditions import Reason, find_true
from torchrun_controller.reconcile.model.messages import count_of, pods_are, sentence
from torchrun_controller.reconcile.model.observed import Observed, ObservedGang
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.times import (
    find_end,
    running_since,
    seconds_left,
    seconds_of_gang,
    whole_attempts,
)
from torchrun_controller.reconcile.pods import head_and_workers, waiting
from torchrun_controller.reconcile.pods.lifecycle import (
    attempt_of,
    count_scheduled,
    count_workers,
    index_of,
)
from torchrun_controller.reconcile.pods.nodes import LOST_AFTER, find_loss, is_ready
from torchrun_controller.reconcile.schedulers import groups
from torchrun_controller.reconcile.workspace import delivery

JOB_DELETED = "JobDeleted"
STARTING = "WorkersStarting"  # the reason of a gang without trouble whose pods do not all run


class GangState(msgspec.Struct, frozen=True):
    """The state of a gang. `seconds_left`: until a failure counts without a better cause.

    `stopped` is since when not all pods run, although the status may say so: no controller may have
    seen it.
    """

    state: State
    why: Reason
    failure: Failure | None = None
    seconds_left: float | None = None
    stopped: datetime | None = None


def evaluate_state(
    observed: Observed, unfenced: tuple[UnfencedWorker, ...], now: datetime
) -> GangState:
    """Return the state of the gang of the present attempt; `unfenced` may keep its gate closed.

    The condition of the Job decides on success: some succeeded pods prove nothing about the others.
    Where a head has a separate Job, the Job of the workers matters only for failures. A failure
    counts from the first failed pod on, well before the Job is Failed. A pod that lost a peer waits
    a moment for the failure of that peer.
    """
    job, gang, nodes = observed.job, observed.gang, observed.cluster.nodes
    completed_job = find_completed_job(gang)
    if completed_job is not None:
        size = head_and_workers.nodes_of(completed_job)
        message = f"{size} of {count_of(size, 'pod')} succeeded."
        if head_and_workers.has_head(completed_job):
            message = "The head succeeded."
        stopped = _time_of(completed_job, "Complete")
        return GangState(State.GANG_SUCCEEDED, Reason("Completed", message), stopped=stopped)
    child = gang.current_job
    deletion_failure = find_deletion(job, gang)
    if head_and_workers.head_has_succeeded(gang) and not child.metadata.terminating:
        return GangState(*_progress(observed, unfenced, now))
    failed_job = head_and_workers.find_failed_job(gang)
    if failed_job is None and deletion_failure is None:
        loss, seconds_left = find_loss_in_suspension(observed, unfenced, now)
        if loss is not None:
            why = failure_reason(loss.details)
            times = (loss.details.time, _time_of(child, "Suspended"))
            stopped = min((time for time in times if time is not None), default=None)
            return GangState(State.GANG_FAILED, why, loss, stopped=stopped)
        if child.spec.suspend:
            # The Job controller deletes the pods, which is not a failure.
            return GangState(
                *_suspension(job, gang),
                stopped=_time_of(child, "Suspended"),
                seconds_left=seconds_left,
            )
    failure = _pod_failure(gang, nodes, now)
    if deletion_failure is not None and (failure is None or _precedes(deletion_failure, failure)):
        return _failed_state(deletion_failure)
    seconds_left = None
    if failure is not None:
        seconds_left = peer_wait_left(failure.details, gang.workers, now)
    elif failed_job is not None:
        # No pod shows why.
        recorded_workers = job.status.workers if is_recorded(job, gang) else None
        failure = failure_of_job(gang, *failed_job, recorded_workers)
        seconds_left = pods_wait_left(gang, failed_job[0], failure.details, recorded_workers, now)
    if failure is not None and seconds_left is None:
        return _failed_state(failure)
    return GangState(
        *_progress(observed, unfenced, now),
        seconds_left=seconds_left,
        stopped=None if failure is None else failure.details.time,
    )


def _failed_state(failure: Failure) -> GangState:
    details = failure.details
    return GangState(State.GANG_FAILED, failure_reason(details), failure, stopped=details.time)


def _time_of(child: Job, kind: str) -> datetime | None:
    """Return since when this condition of the Job is True."""
    condition = find_true(child.status.conditions, kind)
    return None if condition is None else condition.last_transition_time


def _pod_failure(
    gang: ObservedGang, nodes: Mapping[str, Node] | None, now: datetime
) -> Failure | None:
    """Return the root cause. On a lost machine, the loss counts and not the status of the pod."""
    pods = head_and_workers.pods_since_resumption(gang)
    losses = {pod.metadata.uid: find_loss(nodes, pod, now) for pod in pods}
    node_failures = tuple(
        node_failure(pod, loss.message, loss.since)
        for pod in pods
        if (loss := losses[pod.metadata.uid]) is not None
    )
    return find_root_cause(tuple(p for p in pods if losses[p.metadata.uid] is None), node_failures)


def find_deletion(job: TorchrunJob, gang: ObservedGang) -> Failure | None:
    """Return the deletion of a Job of the present gang; None if none is being deleted."""
    name = head_and_workers.find_deleted_job(job, gang)
    return _job_deleted(name, gang.current_job.metadata.deletion_timestamp) if name else None


def find_vanished_gang(job: TorchrunJob, now: datetime) -> tuple[Failure, Attempt] | None:
    """Return the deletion of a gang whose Job is gone and whose end the status does not have.

    The controller itself deletes the Job of the present attempt only after the status has its end.
    """
    status = job.status
    if status.workers is None or find_end(status.attempts, status.attempt) is not None:
        return None
    failure = _job_deleted(names.child_job(job.metadata.name, status.attempt), now)
    since, checkpoint = running_since(status), status.last_checkpoint
    end = Attempt(
        number=status.attempt,
        end_time=now,
        running_seconds=round(seconds_of_gang(status, now)),
        step=None if since is None else newest_step(status, None, since),
        checkpoint_step=None if checkpoint is None else checkpoint.step,
        reason=JOB_DELETED,
        message=failure.details.message,
    )
    return failure, end


def _precedes(deletion: Failure, failure: Failure) -> bool:
    """Whether the deletion is the cause of the failure: the failure is later, or a deleted pod."""
    if failure.details.reason == POD_DELETED:
        return True
    deletion_time, failure_time = deletion.details.time, failure.details.time
    return deletion_time is None or failure_time is None or failure_time >= deletion_time


def _job_deleted(name: str, time: datetime | None) -> Failure:
    message = f"Job {name} was deleted"
    return Failure(
        details=LastFailure(reason=JOB_DELETED, message=message, time=time), disruption=True
    )


def find_loss_in_suspension(
    observed: Observed, unfenced: tuple[UnfencedWorker, ...], now: datetime
) -> tuple[Failure | None, float | None]:
    """Return the loss that ends the attempt, and else the seconds until there may be one.

    While the Job is suspended, the machine has as long to recover as that of a gang that runs. A
    Job that has resumed ends at once: a gate of its new pods must not open. A pod that was removed
    from a machine that responds, for example with --force, may run there as well.
    """
    gang, machines = observed.gang, observed.cluster.nodes
    workers = _left_behind(gang, unfenced)
    if not workers:
        return None, None
    first = min(workers, key=lambda worker: worker.since or now)
    wait = seconds_left(LOST_AFTER, first.since, now)
    child = gang.current_job
    if child.spec.suspend and wait > 0:
        return None, wait
    machine = None if machines is None else machines.get(first.node)
    responds = machine is not None and is_ready(machine)
    pod = f"pod from before the suspension of Job {child.metadata.name}"
    if responds:
        reason = POD_DELETED
        message = f"A {pod} was removed from machine {first.node}, but may still run there."
    else:
        reason = "NodeLost"
        message = f"Machine {first.node} is lost. A {pod} may still run there."
    details = LastFailure(node=first.node, reason=reason, message=message, time=first.since)
    return Failure(details=details, disruption=True), None


def _left_behind(
    gang: ObservedGang, unfenced: tuple[UnfencedWorker, ...]
) -> tuple[UnfencedWorker, ...]:
    """Return the workers of the present attempt that may still run from before a suspension."""
    child = gang.current_job
    attempt = attempt_of(child)
    own_workers = tuple(worker for worker in unfenced if worker.attempt == attempt)
    if not own_workers or child.spec.suspend:
        return own_workers
    if head_and_workers.resumption_of(gang) is None:
        return ()
    new_pods = head_and_workers.pods_since_resumption(gang)
    present = {(index_of(pod), pod.spec.node_name) for pod in new_pods}
    return tuple(worker for worker in own_workers if (worker.index, worker.node) not in present)


def _progress(
    observed: Observed, unfenced: tuple[UnfencedWorker, ...], now: datetime
) -> tuple[State, Reason]:
    """Return whether a gang without failures runs, or why it does not."""
    gang = observed.gang
    nodes = head_and_workers.nodes_of(gang.current_job)
    counts = count_workers(gang.workers, nodes)
    claims = delivery.mounted_claims(observed.job, gang, observed.workspace)
    jobs = head_and_workers.jobs_of(gang)
    problem = waiting.gang_reason(jobs, nodes, gang.workers, claims, observed.cluster.warnings)
    if problem is None and count_scheduled(gang.workers) < nodes:
        problem = groups.waiting_reason(gang)
    closed = gate.closed_reason(observed, unfenced, now)
    state = "running or completed" if counts.succeeded else "running"
    message = f"{pods_are(nodes - counts.pending, nodes)} {state}."
    if counts.pending == 0 and closed is None and gate.is_open(gang):
        # The ranks run, whatever another container of their pods waits for.
        note = f" {problem.message}" if problem is not None else ""
        return State.GANG_RUNNING, Reason("WorkersRunning", message + note)
    why = problem or closed
    if why is not None:
        return State.GANG_STARTING, why
    cause = _restart_cause(observed.job, gang)
    if cause is not None:
        cause_text = f"Attempt {cause.number} ended: {sentence(cause.message)}"
        return State.GANG_STARTING, Reason("Restarting", f"{message} {cause_text}")
    return State.GANG_STARTING, Reason(STARTING, message)


def _restart_cause(job: TorchrunJob, gang: ObservedGang) -> Attempt | None:
    """Return the failed attempt that the present gang replaces; None if it replaces none."""
    number = attempt_of(gang.current_job)
    ends = whole_attempts(job.status.attempts)
    earlier_attempts = [attempt for attempt in ends if attempt.number < number]
    last_attempt = max(earlier_attempts, key=lambda attempt: attempt.number, default=None)
    return None if last_attempt is None or last_attempt.reason in INTENDED_ENDS else last_attempt


def _suspension(job: TorchrunJob, gang: ObservedGang) -> tuple[State, Reason]:
    """Return the state of a suspended child Job: its gang scheduler or a user has suspended it."""
    child, status = gang.current_job, job.status
    name, admitter = child.metadata.name, groups.find_admitter(child)
    refusal = groups.waiting_reason(gang)
    has_run = status.phase in ("Running", "Preempted") and attempt_of(child) == status.attempt
    if admitter is not None and not has_run:
        message = f"Job {name} is waiting for admission by {admitter.api.title}."
        wait_reason = Reason(admitter.waiting_reason, message)
        return State.GANG_STARTING, Reason(
            wait_reason.reason, refusal.message
        ) if refusal else wait_reason
    author = f" by {admitter.api.title}" if admitter is not None else ""
    suffix = f" {refusal.message}" if refusal else ""
    message = f"Job {name} is suspended{author}. The pods start again when it is resumed.{suffix}"
    return State.GANG_SUSPENDED, Reason("JobSuspended", message)


def failure_reason(failure: LastFailure) -> Reason:
    """Return the root cause in a line."""
    parts = [
        f"rank {failure.rank}" if failure.rank is not None else "",
        f"machine {failure.node}" if failure.node and failure.node not in failure.message else "",
        f"signal {failure.signal}" if failure.signal else "",
        f"exit code {failure.exit_code}" if failure.exit_code is not None else "",
    ]
    facts = ", ".join(part for part in parts if part)
    message = f"{failure.message.removesuffix('.')} ({facts})" if facts else failure.message
    return Reason(failure.reason, sentence(message))
