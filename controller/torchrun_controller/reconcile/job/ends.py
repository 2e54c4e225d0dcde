"""Pauses and ends: suspend, deadlines, what is left to do for a job that is over."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api.core import Pod
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_controller.reconcile.gang import fence, gang, halves
from torchrun_controller.reconcile.gang.decision import Decision, soonest
from torchrun_controller.reconcile.gang.orphans import orphans, way_out
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.spec import admission_status
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability
from torchrun_controller.reconcile.workspace.delivery import serves
from torchrun_controller.reconcile.workspace.preparation import end_preparations


def suspend(observed: Observed, now: datetime) -> Decision:
    """Free everything but the claims; the ranks get their grace period for a checkpoint."""
    syncing = end_preparations(observed, serving=False)
    # A serve pod may hold the only copy of the code: it is kept as claims are.
    preparing = (p for p in (*observed.sync_pods, *observed.setup_pods) if not serves(p))
    ending = Decision(
        state=State.SUSPENDING,
        why=Reason("Suspending", ""),
        attempt=observed.job.status.attempt,
        counts=gang.counts_of(observed),
        deletes=syncing,
    )
    still = _end_gang(observed, ending, Reason("Suspended", "spec.suspend was set"), now)
    still = still or _wait_for_pods(observed, ending, now, *preparing)
    if still is not None:
        return still
    why = Reason("Suspended", "spec.suspend is true; claims are kept, nothing else")
    return replace(ending, state=State.SUSPENDED, why=why, deletes=())


def preempt(observed: Observed, told: str, now: datetime) -> Decision:
    """Free what the gang takes, as for a pause; `told` is why the admission is taken back.

    Only the end of this gives back what the queue's quota is charged with.
    """
    ending = Decision(
        state=State.PREEMPTING,
        why=Reason("Preempting", told),
        attempt=observed.job.status.attempt,
        counts=gang.counts_of(observed),
    )
    still = _end_gang(observed, ending, Reason(admission_status.PREEMPTED, told), now)
    still = still or _wait_for_pods(observed, ending, now)
    if still is not None:
        return still
    return replace(ending, state=State.PREEMPTED, why=Reason(admission_status.PREEMPTED, told))


def _end_gang(
    observed: Observed, ending: Decision, cause: Reason, now: datetime
) -> Decision | None:
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
    if not gang.is_in_status(observed) or fence.unrecorded(observed, now):
        # Only its Job knows its number and its counts, and only its pods who may run on although
        # their node is lost: all of it stays until the status has that.
        return noted
    standing = [job for job in observed.child_jobs if job.metadata.deletion_timestamp is None]
    if not standing and gang.recorded(observed) is not None:
        return None  # the Jobs go when their pods have: these are waited for
    ended = gang.record(observed, cause, now, counted=False)
    return replace(
        noted,
        deletes=(*noted.deletes, *(gang.delete(job) for job in standing)),
        status_before_deletes=True,
        ended=(*noted.ended, ended),
    )


def _wait_for_pods(
    observed: Observed, ending: Decision, now: datetime, *preparing: Pod
) -> Decision | None:
    """While pods of the gang, or those that prepare one, still end; None once nothing runs."""
    # A pod on a lost node never tells of its end: it is remembered, and holds the next gang.
    gangs = (*observed.workers, *observed.stale_pods)
    heard_of = (pod for pod in gangs if nodes.loss(observed, pod, now) is None)
    waiting = [pod for pod in (*heard_of, *preparing) if alive(pod)]
    if not waiting:
        return None
    names = ", ".join(sorted(pod.metadata.name for pod in waiting)[:4])
    message = f"{len(waiting)} pods still end: {names}"
    advice = way_out(tuple(pod for pod in orphans(observed) if pod in waiting))
    return replace(ending, why=_and(ending.why, f"{message}. {advice}" if advice else message))


def _and(why: Reason, message: str) -> Reason:
    return Reason(why.reason, f"{why.message}; {message}" if why.message else message)


def _end_what_runs(
    observed: Observed, policy: ResolvedReliability, now: datetime
) -> tuple[tuple[Delete, ...], float | None]:
    """Workers beside a head that has succeeded have their grace period to end by themselves."""
    status, succeeded = observed.job.status, gang.completed(observed)
    has_successor = succeeded is not None and succeeded is not observed.child_jobs[-1]
    if status.phase != "Succeeded" or has_successor:
        return gang.end_survivors(observed), None
    workers, ended = halves.end_workers(observed), status.completion_time or now
    left = policy.grace_seconds - (now - ended).total_seconds()
    return ((), left) if workers and left > 0 else (workers, None)


def after_the_end(
    observed: Observed, policy: ResolvedReliability, now: datetime
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
