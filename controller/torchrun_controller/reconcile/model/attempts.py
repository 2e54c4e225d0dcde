"""The ends of attempts that the status records."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeAlias

from torchrun_api.status import Attempt

_NO_TIME = datetime.min.replace(tzinfo=UTC)


def find_end(attempts: Iterable[Attempt], number: int) -> Attempt | None:
    """Return the end of the attempt of this number; None if `attempts` do not record it."""
    return next((end for end in whole_attempts(attempts) if end.number == number), None)


def whole_attempts(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the ends of whole attempts, without those of rounds and of pods replaced alone."""
    return tuple(end for end in attempts if end.round is None and end.lost_pod is None)


Identity: TypeAlias = tuple[int, int, int, str]


def identity_of(attempt: Attempt) -> Identity:
    """Return what no other end has: of rounds, of pods replaced alone, and of whole attempts."""
    if attempt.round is not None:
        return attempt.number, 0, attempt.round, ""
    if attempt.lost_pod is not None:
        return attempt.number, 1, 0, attempt.lost_pod.uid
    return attempt.number, 2, 0, ""


def order_of(attempt: Attempt) -> tuple[int, int, int, datetime]:
    """Return the sort key: rounds, then lost pods by their time, then the end of the attempt.

    Rounds and lost pods are not mixed: their times come from different clocks.
    """
    number, sort, round_number, _ = identity_of(attempt)
    time = attempt.end_time if attempt.lost_pod is not None else None
    return number, sort, round_number, time or _NO_TIME
