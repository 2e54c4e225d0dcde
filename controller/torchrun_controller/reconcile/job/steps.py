"""The next step of one job: its phase, what is written, and when to look again."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile.gang import fence, gang, halves
from torchrun_controller.reconcile.gang.decision import Decision, soonest
from torchrun_controller.reconcile.job import elastic, progress, refusals, status
from torchrun_controller.reconcile.job.between import proceed
from torchrun_controller.reconcile.job.ends import after_the_end
from torchrun_controller.reconcile.job.running import watch
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.phases import TERMINAL, State, transition
from torchrun_controller.reconcile.model.plan import Plan
from torchrun_controller.reconcile.model.times import deadline_left, sync_left, without_future
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.reconcile.schedulers import groups
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability, resolve_reliability


def reconcile(observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """The next step of one job. `now` is in UTC with whole seconds, as the API keeps times."""
    present = observed.job.status
    if observed.job.metadata.deletion_timestamp is not None:
        return Plan()
    policy = resolve_reliability(observed.job, observed.queue)
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
    row = transition(present.phase, decision.state)
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
        status_before_deletes=decision.status_before_deletes,
        status=None if composed == status.own(present) else composed,
        events=status.events(present, composed, decision, row),
        requeue_after=soonest(
            decision.requeue_after,
            nodes.next_look(observed, now),
            fence.next_look(observed, now),
            sync_left(composed, policy.sync_timeout, now),
            deadline_left(composed, policy.deadline, now),
            _time_to_live(composed, policy),
            progress.left(observed, composed.progress, now),
        ),
    )


def _time_to_live(composed: TorchrunJobStatus, policy: ResolvedReliability) -> float | None:
    if composed.phase not in TERMINAL or policy.time_to_live is None:
        return None
    return max(policy.time_to_live.total_seconds(), 1.0)


def _decide(
    observed: Observed, policy: ResolvedReliability, now: datetime, defaults: Defaults
) -> Decision:
    """The first finding that holds."""
    if gang.is_there(observed):
        return watch(observed, policy, now, defaults)
    return proceed(observed, policy, now, defaults)


def _unless_late(
    observed: Observed, decision: Decision, policy: ResolvedReliability, now: datetime
) -> Decision:
    """The decision, but for a workspace that is not ready in time: then the job fails."""
    if decision.state not in (State.WORKSPACE_SYNCING, State.WORKSPACE_REFUSED):
        return decision
    left = sync_left(observed.job.status, policy.sync_timeout, now)
    if left is None or left > 0:
        return decision
    assert policy.sync_timeout is not None
    seconds = policy.sync_timeout.total_seconds()
    message = f"the workspace was not ready within {seconds:.0f} s (syncTimeoutSeconds); "
    why = Reason("SyncTimeout", message + decision.why.message)
    return replace(decision, state=State.SYNC_TIMED_OUT, why=why, applies=(), deletes=())
