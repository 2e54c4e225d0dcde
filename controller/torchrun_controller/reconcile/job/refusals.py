"""What the API server refuses of a job's objects, and what goes on without them.

A refused write is left out of the Plan until it is to be tried again. A gang that lives goes on:
its status, its deadline and everything else of it. A gang that is yet to be created waits until
all its objects are accepted.
"""

from typing import TypeAlias

from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.observed import Conflict, Observed, Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods import waiting

CONDITION = "WritesAccepted"
NAMED = 4  # refusals in a message; of the others it has the number

Identity: TypeAlias = tuple[str, str, str]  # verb, resource, name


def identity(write: Apply | Delete) -> Identity:
    """What a refusal is about: the same verb on the same object."""
    verb = "delete" if isinstance(write, Delete) else "apply"
    return verb, write.kind.resource, write.name


def refusal_of(observed: Observed, write: Apply | Delete) -> Reason | None:
    """Why this write is refused at present; None if it is not."""
    wanted = identity(write)
    if isinstance(write, Apply):
        for conflict in observed.refused.conflicts:
            if ("apply", conflict.resource, conflict.name) == wanted:
                return _why(conflict)
    found = (r for r in observed.refused.rejections if (r.verb, r.resource, r.name) == wanted)
    return next((_why(rejection) for rejection in found), None)


def accepted(observed: Observed, applies: tuple[Apply, ...]) -> tuple[Apply, ...]:
    """Those that are not refused."""
    return tuple(apply for apply in applies if refusal_of(observed, apply) is None)


def accepted_deletes(observed: Observed, deletes: tuple[Delete, ...]) -> tuple[Delete, ...]:
    """Those that are not refused."""
    return tuple(delete for delete in deletes if refusal_of(observed, delete) is None)


def all_or_refused(observed: Observed, applies: tuple[Apply, ...]) -> tuple[Apply, ...]:
    """Objects that need each other: all of them, or those that are refused and keep the others.

    The refused ones stay in the decision, so that the status tells of them.
    """
    refused = tuple(apply for apply in applies if refusal_of(observed, apply) is not None)
    return refused or applies


def condition(observed: Observed, applies: tuple[Apply, ...]) -> ConditionUpdate | None:
    """The warning of what is refused; `applies` are what the job needs now."""
    told = [_why(rejection) for rejection in observed.refused.rejections]
    names = {("apply", r.resource, r.name) for r in observed.refused.rejections}
    wanted = (apply for apply in applies if identity(apply) not in names)
    told += [why for apply in wanted if (why := refusal_of(observed, apply)) is not None]
    if not told:
        return None
    more = f"; and {len(told) - NAMED} more" if len(told) > NAMED else ""
    message = "; ".join(why.message for why in told[:NAMED])
    return ConditionUpdate(
        CONDITION, "False", Reason(told[0].reason, f"{message}{more}; tried again later")
    )


def _why(refused: Conflict | Rejection) -> Reason:
    if isinstance(refused, Conflict):
        return Reason("NameConflict", refused.message)
    if refused.verb == "delete":
        said = f"the API server refused to delete {refused.resource} {refused.name}"
        return Reason("Rejected", f"{said}: {refused.message}")
    why = waiting.explain_refusal(refused.message)
    if why.reason == "QuotaExceeded":
        return Reason(why.reason, f"{refused.resource} {refused.name}: {why.message}")
    said = f"the API server refused {refused.resource} {refused.name}"
    return Reason("Rejected", f"{said}: {refused.message}")
