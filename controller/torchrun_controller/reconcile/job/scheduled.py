"""The condition Scheduled, and the message of Running where another condition has it in full."""

from collections.abc import Mapping

from torchrun_api.meta import Condition
from torchrun_controller.reconcile.gang.decision import Decision
from torchrun_controller.reconcile.gang.elastic import FULL_SIZE
from torchrun_controller.reconcile.gang.restarts import AWAITING_EDIT
from torchrun_controller.reconcile.model.conditions import (
    ADMITTED,
    BLOCKED_REASONS,
    ConditionUpdate,
    Reason,
    find_condition,
)
from torchrun_controller.reconcile.model.messages import pods_are
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.pods.lifecycle import count_scheduled

SCHEDULED = "Scheduled"
# Reasons of a waiting gang that need an action of a user or an administrator.
TROUBLE_REASONS = BLOCKED_REASONS | {
    *("Unschedulable", "GangUnschedulable", "QuotaExceeded", "JobSuspended", "Restarting"),
    *("WaitingForFence", "ClaimTerminating", "SetupPodLost", AWAITING_EDIT),
}


def build_condition(
    gang: ObservedGang, decision: Decision, nodes: int, updates: Mapping[str, ConditionUpdate]
) -> ConditionUpdate:
    """Return the condition Scheduled of a gang of `nodes` pods; `updates` are the others."""
    scheduled_count = _scheduled_count(gang, decision, nodes)
    why = _without_size(_why_placed(decision, scheduled_count, nodes), updates)
    return ConditionUpdate(SCHEDULED, "True" if scheduled_count == nodes else "False", why)


def _scheduled_count(gang: ObservedGang, decision: Decision, nodes: int) -> int:
    """Return the number of workers that have a node."""
    match decision.state:
        case State.READY | State.BACKING_OFF:
            return 0
        case State.GANG_SUCCEEDED:
            return nodes  # the cache of pods may lag behind that of Jobs
        case _:
            return count_scheduled(gang.workers)


def _why_placed(decision: Decision, scheduled_count: int, nodes: int) -> Reason:
    """Return how many workers have a node, and why the others have none, if known."""
    if decision.state is State.BACKING_OFF:  # the gang has ended: its pods need no node
        return Reason(decision.why.reason, "The pods are created again after the back-off.")
    if scheduled_count == nodes:
        return Reason("WorkersScheduled", f"{pods_are(scheduled_count, nodes)} scheduled.")
    why = decision.why
    has_trouble = why.reason in TROUBLE_REASONS and why.reason != "Restarting"
    if decision.state is State.GANG_STARTING and has_trouble:
        return why
    return Reason("WorkersWaiting", f"{pods_are(scheduled_count, nodes)} scheduled.")


def _without_size(why: Reason, updates: Mapping[str, ConditionUpdate]) -> Reason:
    """Return the reason without the message of the condition FullSize, which has it in full."""
    size = updates.get(FULL_SIZE)
    text = why.message.removesuffix(f" {size.why.message}") if size is not None else why.message
    return Reason(why.reason, text)


def refer(
    why: Reason, updates: Mapping[str, ConditionUpdate], conditions: tuple[Condition, ...]
) -> Reason:
    """Return the reason for Running, without what other conditions of the job have in full."""
    scheduled_update, size_update = updates.get(SCHEDULED), updates.get(FULL_SIZE)
    admission = find_condition(conditions, ADMITTED)
    if size_update is not None and _contains(size_update.why, why):
        return Reason(why.reason, "All pods are running. See the condition FullSize.")
    if admission is not None and admission.status == "False" and admission.message == why.message:
        return Reason(why.reason, "The job is not admitted. See the condition Admitted.")
    own_why = _without_size(why, updates)
    if scheduled_update is None:
        return own_why
    if scheduled_update.why == own_why:
        return Reason(why.reason, "Not all pods are scheduled. See the condition Scheduled.")
    # How many pods have a node is followed by why the others do not run.
    return Reason(why.reason, own_why.message.removeprefix(f"{scheduled_update.why.message} "))


def _contains(whole: Reason, part: Reason) -> bool:
    """Whether the message of `whole` starts with that of `part`, and the reasons are equal."""
    return whole.reason == part.reason and whole.message.startswith(part.message)
