"""Pauses and ends: suspend, deadlines, what is left to do for a job that is over."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api.core import Pod
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile.attempts import admitted, fence, gang, halves
from torchrun_controller.reconcile.decision import Decision, soonest
from torchrun_controller.reconcile.observed import Observed
from torchrun_controller.reconcile.phases import Finding
from torchrun_controller.reconcile.placement import nodes
from torchrun_controller.reconcile.plan import Delete
from torchrun_controller.reconcile.policy import Policy
from torchrun_controller.reconcile.workers import Why, alive
from torchrun_controller.reconcile.workspace.delivery import serves
from torchrun_controller.reconcile.workspace.preparation import end_preparations


def suspend(observed: Observed, now: datetime) -> Decision:
    """Free everything but the claims; the ranks get their grace period for a checkpoint."""
    syncing = end_preparations(observed, serving=False)
    # A serve pod may hold the only copy of the code: it is kept as claims are.
    preparing = (p for p in (*observed.sync_pods, *observed.setup_pods) if not serves(p))
    ending = Decision(
        finding=Finding.SUSPENDING,
        why=Why("Suspending", ""),
        attempt=observed.job.status.attempt,
        counts=gang.counts_of(observed),
        deletes=syncing,
    )
    still = _end_gang(observed, ending, Why("Suspended", "spec.suspend was set"), now)
    still = still or _wait_for_pods(observed, ending, now, *preparing)
    if still is not None:
        return still
    why = Why("Suspended", "spec.suspend is true; claims are kept, nothing else")
    return replace(ending, finding=Finding.SUSPENDED, why=why, deletes=())


def preempt(observed: Observed, told: str, now: datetime) -> Decision:
    """Free what the gang takes, as for a pause; `told` is why the admission is taken back.

    Only the end of this gives back what the queue's quota is charged with.
    """
    ending = Decision(
        finding=Finding.PREEMPTING,
        why=Why("Preempting", told),
        attempt=observed.job.status.attempt,
        counts=gang.counts_of(observed),
    )
    still = _end_gang(observed, ending, Why(admitted.PREEMPTED, told), now)
    still = still or _wait_for_pods(observed, ending, now)
    if still is not None:
        return still
    return replace(ending, finding=Finding.PREEMPTED, why=Why(admitted.PREEMPTED, told))


def _end_gang(observed: Observed, ending: Decision, cause: Why, now: datetime) -> Decision | None:
    """The step that ends the present gang because of `cause`; None if there is none."""
    if not observed.child_jobs:
        return None
    child = observed.child_jobs[-1]
    noted = replace(
        ending,
        why=_and(ending.why, f"the workers of Job {child.metadata.name} get SIGTERM and end"),
        attempt=max(gang.attempt_of(child), ending.attempt),
        ended=gang.ended_before(observed),
    )
    if not gang.is_in_status(observed) or fence.untold(observed, now):
        # Only its Job knows its number and its counts, and only its pods who may run on although
        # their node is lost: all of it stays until the status has that.
        return noted
    ended = gang.record(observed, cause, now, counted=False)
    return replace(
        noted,
        deletes=(*noted.deletes, *(gang.delete(job) for job in observed.child_jobs)),
        tells_first=True,
        ended=(*noted.ended, ended),
    )


def _wait_for_pods(
    observed: Observed, ending: Decision, now: datetime, *preparing: Pod
) -> Decision | None:
    """While pods of the gang, or those that prepare one, still end; None once nothing runs."""
    # A pod on a lost node never tells of its end: it is remembered, and holds the next gang.
    ghosts = (p for p in observed.ghosts if nodes.loss(observed, p, now) is None)
    waiting = [pod for pod in (*ghosts, *preparing) if alive(pod)]
    if not waiting:
        return None
    names = ", ".join(sorted(pod.metadata.name for pod in waiting)[:4])
    return replace(ending, why=_and(ending.why, f"{len(waiting)} pods still end: {names}"))


def _and(why: Why, message: str) -> Why:
    return Why(why.reason, f"{why.message}; {message}" if why.message else message)


def running_since(status: TorchrunJobStatus) -> datetime | None:
    """Since when the gang runs, where it does."""
    if status.phase != "Running":
        return None
    return next(
        (c.last_transition_time for c in status.conditions if c.type == "Running"),
        None,
    )


def seconds_run(status: TorchrunJobStatus, now: datetime) -> float:
    """Running time of all gangs; pauses and waits are not counted, and no clock that goes back."""
    since = running_since(status)
    passed = (now - since).total_seconds() if since else 0.0
    return status.running_seconds + max(passed, 0.0)


def deadline_left(status: TorchrunJobStatus, policy: Policy, now: datetime) -> float | None:
    """Seconds of running time that are left; None without a deadline or while nothing runs."""
    if policy.deadline is None or running_since(status) is None:
        return None
    return policy.deadline.total_seconds() - seconds_run(status, now)


def sync_left(status: TorchrunJobStatus, policy: Policy, now: datetime) -> float | None:
    """Seconds that are left for the workspace; None without a limit or outside Syncing."""
    if policy.sync_timeout is None or status.phase != "Syncing":
        return None
    since = next(
        (c.last_transition_time for c in status.conditions if c.type == "WorkspaceReady"), None
    )
    passed = (now - since).total_seconds() if since else 0.0
    return policy.sync_timeout.total_seconds() - passed


def _end_what_runs(
    observed: Observed, policy: Policy, now: datetime
) -> tuple[tuple[Delete, ...], float | None]:
    """Workers beside a head that has succeeded have their grace period to end by themselves."""
    status = observed.job.status
    if status.phase != "Succeeded":
        return gang.end_survivors(observed), None
    workers, ended = halves.end_workers(observed), status.completion_time or now
    left = policy.grace_seconds - (now - ended).total_seconds()
    return ((), left) if workers and left > 0 else (workers, None)


def after_the_end(
    observed: Observed, policy: Policy, now: datetime
) -> tuple[tuple[Delete, ...], float | None]:
    """What a job that is over still calls for: no pod runs on, and its time to live.

    A TTL on the child Job would delete the Job, and the next reconcile would train again: it is the
    TorchrunJob that is deleted, and all that it owns goes with it.
    """
    status, meta = observed.job.status, observed.job.metadata
    ends, wait = _end_what_runs(observed, policy, now)
    deletes = (*end_preparations(observed), *ends)
    if policy.time_to_live is None or status.completion_time is None:
        return deletes, wait
    left = (policy.time_to_live - (now - status.completion_time)).total_seconds()
    if left > 0:
        return deletes, soonest(left, wait)
    own = Delete(
        kind=TORCHRUN_JOBS,
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        resource_version=meta.resource_version,
    )
    return (own,), None
