"""Refused writes: which of them a Plan omits, and how the status reports them.

A Plan omits a refused write until the controller retries it. For a running gang everything else
continues, such as status and deadline. A new gang waits until all its objects are accepted.
"""

from typing import TypeAlias

from torchrun_api import names
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import JOBS
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.messages import count_of, sentence
from torchrun_controller.reconcile.model.observed import Conflict, RefusedWrites, Rejection
from torchrun_controller.reconcile.model.phases import State
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods import waiting

CONDITION = "WritesAccepted"
LISTED = 4  # most refusals in a message; it counts the others

NO_REFUSALS = RefusedWrites()  # the usual case

Identity: TypeAlias = tuple[str, str, str]  # verb, resource, name


def identity(write: Apply | Delete) -> Identity:
    """Return what identifies a refused write: the verb and the object."""
    verb = "delete" if isinstance(write, Delete) else "apply"
    return verb, write.kind.resource, write.name


def find_refusal(refused: RefusedWrites, write: Apply | Delete) -> Reason | None:
    """Return why this write is refused at present; None if it is not."""
    if refused == NO_REFUSALS:
        return None
    key = identity(write)
    if isinstance(write, Apply):
        for conflict in refused.conflicts:
            if ("apply", conflict.resource, conflict.name) == key:
                return _reason(conflict)
    rejections = (r for r in refused.rejections if (r.verb, r.resource, r.name) == key)
    return next((_reason(rejection) for rejection in rejections), None)


def find_first(refused: RefusedWrites, applies: tuple[Apply, ...]) -> tuple[State, Reason] | None:
    """Return the state of a job that waits for a refused object, and why; None without one.

    The controller decides when to retry.
    """
    for apply in applies:
        why = find_refusal(refused, apply)
        if why is not None:
            return State.NAME_TAKEN if why.reason == "NameConflict" else State.REJECTED, why
    return None


def find_refused_gang(
    refused: RefusedWrites, job: TorchrunJob, latest: int
) -> tuple[State, Reason] | None:
    """Return the refusal of the second Job of a gang of two, for the next gang; None without one.

    Its first Job took the number of that gang, so the next gang has other names, but is refused as
    well. latest: the number of the last gang that was created, -1 before the first.
    """
    for rejection in refused.rejections:
        if (rejection.verb, rejection.resource) == ("apply", JOBS.resource):
            attempt = names.attempt_of_child_job(job.metadata.name, rejection.name)
            if attempt is not None and attempt > latest:
                return State.REJECTED, _reason(rejection)
    return None


def accepted_applies(refused: RefusedWrites, applies: tuple[Apply, ...]) -> tuple[Apply, ...]:
    """Return the applies that are not refused."""
    return tuple(apply for apply in applies if find_refusal(refused, apply) is None)


def accepted_deletes(refused: RefusedWrites, deletes: tuple[Delete, ...]) -> tuple[Delete, ...]:
    """Return the deletes that are not refused."""
    return tuple(delete for delete in deletes if find_refusal(refused, delete) is None)


def all_or_refused(refused: RefusedWrites, applies: tuple[Apply, ...]) -> tuple[Apply, ...]:
    """Return all applies of objects that need each other, or only those that are refused.

    The refused ones stay in the decision, so that the status reports them.
    """
    refused_applies = tuple(apply for apply in applies if find_refusal(refused, apply) is not None)
    return refused_applies or applies


def build_condition(refused: RefusedWrites, applies: tuple[Apply, ...]) -> ConditionUpdate | None:
    """Return the warning of refused writes; `applies` are what the job needs now."""
    if refused == NO_REFUSALS:
        return None
    reasons = [_reason(rejection) for rejection in refused.rejections]
    keys = {("apply", r.resource, r.name) for r in refused.rejections}
    other_applies = (apply for apply in applies if identity(apply) not in keys)
    reasons += [why for apply in other_applies if (why := find_refusal(refused, apply)) is not None]
    if not reasons:
        return None
    messages = " ".join(why.message for why in reasons[:LISTED])
    more_count = len(reasons) - LISTED
    suffix = f" {count_of(more_count, 'more write')} failed." if more_count > 0 else ""
    message = f"{messages}{suffix} The controller will retry."
    return ConditionUpdate(CONDITION, "False", Reason(reasons[0].reason, message))


def _reason(refusal: Conflict | Rejection) -> Reason:
    if isinstance(refusal, Conflict):
        return Reason("NameConflict", sentence(refusal.message))
    target = f"{refusal.resource} {refusal.name}"
    if refusal.verb == "delete":
        message = f"The API server refused to delete {target}: {refusal.message}"
        return Reason("Rejected", sentence(message))
    why = waiting.explain_refusal(refusal.message)
    if why.reason == "QuotaExceeded":
        return Reason(why.reason, f"The API server refused {target}: {why.message}")
    return Reason("Rejected", sentence(f"The API server refused {target}: {refusal.message}"))
