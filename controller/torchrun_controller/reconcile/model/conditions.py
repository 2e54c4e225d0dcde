"""metav1 conditions: replaced by type, with the time of the last change of their status."""

from collections.abc import Iterable
from datetime import datetime
from typing import Protocol, TypeVar

from msgspec import Struct

from torchrun_api.meta import Condition, ConditionStatus

# The API's limit for a condition's message is 32,768 characters; a column or an event bears less.
LONGEST_MESSAGE = 1024
# The one condition of a job that is the coordinator's, who writes it under a manager of his own.
ADMITTED = "Admitted"


class Reason(Struct, frozen=True):
    """A reason in CamelCase and a message that a person can act on."""

    reason: str
    message: str


class ConditionUpdate(Struct, frozen=True):
    """A condition as it shall read, without times."""

    type: str
    status: ConditionStatus
    why: Reason


class Typed(Protocol):
    """Any condition: of jobs, pods or nodes."""

    @property
    def type(self) -> str: ...  # noqa: D102


C = TypeVar("C", bound=Typed)


def find_condition(conditions: Iterable[C], kind: str) -> C | None:
    """The condition of this type, of which there is at most one."""
    return next((condition for condition in conditions if condition.type == kind), None)


def update(
    present: Iterable[Condition], wanted: Iterable[ConditionUpdate], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """`wanted` as conditions. One whose status is unchanged keeps its time."""
    known = {condition.type: condition for condition in present}
    return tuple(_condition(known.get(claim.type), claim, generation, now) for claim in wanted)


def _condition(
    known: Condition | None, claim: ConditionUpdate, generation: int, now: datetime
) -> Condition:
    unchanged = known is not None and known.status == claim.status
    since = known.last_transition_time if known is not None and unchanged else now
    return Condition(
        type=claim.type,
        status=claim.status,
        observed_generation=generation,
        last_transition_time=since,
        reason=claim.why.reason,
        message=claim.why.message[:LONGEST_MESSAGE],
    )
