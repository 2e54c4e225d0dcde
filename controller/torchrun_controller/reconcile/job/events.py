"""The events of a job, by the change of its status."""

from torchrun_api import names
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile.gang.headway import RESUMED
from torchrun_controller.reconcile.gang.restarts import restart_events
from torchrun_controller.reconcile.gang.state import STARTING
from torchrun_controller.reconcile.job import network, refusals
from torchrun_controller.reconcile.job.decisions import Decision
from torchrun_controller.reconcile.job.status import TROUBLE_REASONS
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Event

# States, and reasons of a waiting gang, that need an action of a user or an administrator.
TROUBLE = frozenset(
    {
        State.GANG_FAILED,
        State.BACKING_OFF,
        State.DEADLINE_EXCEEDED,
        State.SYNC_TIMED_OUT,
        State.QUEUE_MISSING,
        State.SPEC_INVALID,
        State.DEPENDENCY_FAILED,
        State.SCHEDULER_MISSING,
        State.NAME_TAKEN,
        State.REJECTED,
        State.WORKSPACE_REFUSED,
    }
)


def list_events(
    before: TorchrunJobStatus, composed: TorchrunJobStatus, decision: Decision
) -> tuple[Event, ...]:
    """Return one event for each change of phase or reason, new warning, and restart in place.

    The usual start of pods has none. Neither has a change of the message alone: counts in it change
    with each scheduling attempt.
    """
    return (
        *_change_events(before, composed, decision),
        *_warning_events(before, composed),
        *restart_events(before, composed),
    )


def _warning_events(before: TorchrunJobStatus, composed: TorchrunJobStatus) -> list[Event]:
    kinds = {
        *("StorageShared", "StorageReady", "Distributed"),
        *(names.UP_TO_DATE, refusals.CONDITION, RESUMED),
    }
    old = {(condition.type, condition.reason) for condition in before.conditions}
    return [
        Event("Warning", condition.reason, condition.message)
        for condition in composed.conditions
        if (condition.type in kinds and condition.status == "False")
        or condition.type == network.CONDITION
        if (condition.type, condition.reason) not in old
    ]


def _change_events(
    before: TorchrunJobStatus, composed: TorchrunJobStatus, decision: Decision
) -> list[Event]:
    why, state = decision.why, decision.state
    if before.phase == composed.phase and before.reason == why.reason:
        return []
    is_trouble = state in TROUBLE or why.reason in TROUBLE_REASONS
    event = Event("Warning" if is_trouble else "Normal", why.reason, why.message)
    # The child Job and its pods have events of their own for a usual start.
    events = [event] if why.reason != STARTING or is_trouble else []
    return events if decision.warning is None else [*events, decision.warning]
