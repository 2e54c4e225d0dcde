"""The pure core: what is observed goes in, a Plan comes out.

`reconcile` is a function of its arguments alone: no I/O, no clock, no memory. All memory is in the
API's objects, so that the process may be killed anywhere and nothing is lost or done twice.
"""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile import progress, refusals, status
from torchrun_controller.reconcile.attempts import elastic, fence, gang, halves
from torchrun_controller.reconcile.between import proceed
from torchrun_controller.reconcile.decision import Decision, soonest
from torchrun_controller.reconcile.ends import after_the_end
from torchrun_controller.reconcile.observed import Conflict, Defaults, Observed, Rejection
from torchrun_controller.reconcile.phases import TERMINAL, Finding, transition
from torchrun_controller.reconcile.placement import nodes
from torchrun_controller.reconcile.plan import Apply, Delete, Event, Plan
from torchrun_controller.reconcile.policy import Policy, policy_of
from torchrun_controller.reconcile.schedulers import groups
from torchrun_controller.reconcile.times import deadline_left, sync_left, without_future
from torchrun_controller.reconcile.watching import watch
from torchrun_controller.reconcile.workers import Why

__all__ = [
    "Apply",
    "Conflict",
    "Defaults",
    "Delete",
    "Event",
    "Observed",
    "Plan",
    "Rejection",
    "reconcile",
]


def reconcile(observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """The next step of one job. `now` is in UTC with whole seconds, as the API keeps times."""
    present = observed.job.status
    if observed.job.metadata.deletion_timestamp is not None:
        return Plan()
    policy = policy_of(observed.job, observed.queue)
    if present.phase in TERMINAL:
        deletes, left = after_the_end(observed, policy, now)
        deletes += (*elastic.leftovers(observed, None), *groups.leftovers(observed, ()))
        deletes += halves.delete_headless(observed)
        told = status.after_the_end(observed, now)
        return Plan(
            deletes=refusals.accepted_deletes(observed, deletes),
            status=None if told == status.own(present) else told,
            requeue_after=left,
        )
    observed = without_future(observed, now)
    decision = _unless_late(observed, _decide(observed, policy, now, defaults), policy, now)
    row = transition(present.phase, decision.finding)
    assert row is not None, "terminal phases were dealt with"
    composed = status.compose(observed, decision, row, now)
    deletes = (
        *decision.deletes,
        *elastic.leftovers(observed, decision),
        *groups.leftovers(observed, decision.applies),
        *halves.delete_headless(observed),
    )
    return Plan(
        applies=refusals.accepted(observed, decision.applies),
        deletes=refusals.accepted_deletes(observed, deletes),
        tells_first=decision.tells_first,
        status=None if composed == status.own(present) else composed,
        events=status.events(present, composed, decision, row),
        requeue_after=soonest(
            decision.requeue_after,
            nodes.next_look(observed, now),
            fence.next_look(observed, now),
            sync_left(composed, policy, now),
            deadline_left(composed, policy, now),
            _time_to_live(composed, policy),
            progress.left(observed, composed.progress, now),
        ),
    )


def _time_to_live(composed: TorchrunJobStatus, policy: Policy) -> float | None:
    if composed.phase not in TERMINAL or policy.time_to_live is None:
        return None
    return max(policy.time_to_live.total_seconds(), 1.0)


def _decide(observed: Observed, policy: Policy, now: datetime, defaults: Defaults) -> Decision:
    """The first finding that holds."""
    if gang.is_there(observed):
        return watch(observed, policy, now, defaults)
    return proceed(observed, policy, now, defaults)


def _unless_late(observed: Observed, decision: Decision, policy: Policy, now: datetime) -> Decision:
    """The decision, but for a workspace that is not ready in time: then the job fails."""
    if decision.finding not in (Finding.WORKSPACE_SYNCING, Finding.WORKSPACE_REFUSED):
        return decision
    left = sync_left(observed.job.status, policy, now)
    if left is None or left > 0:
        return decision
    assert policy.sync_timeout is not None
    seconds = policy.sync_timeout.total_seconds()
    message = f"the workspace was not ready within {seconds:.0f} s (syncTimeoutSeconds); "
    why = Why("SyncTimeout", message + decision.why.message)
    return replace(decision, finding=Finding.SYNC_TIMED_OUT, why=why, applies=(), deletes=())
