"""The ends of attempts that the status records."""

from collections.abc import Iterable

from torchrun_api.status import Attempt


def find_end(attempts: Iterable[Attempt], number: int) -> Attempt | None:
    """Return the end of the attempt of this number; None if `attempts` do not record it."""
    return next((end for end in whole_attempts(attempts) if end.number == number), None)


def whole_attempts(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the ends of whole attempts, without those of rounds."""
    return tuple(attempt for attempt in attempts if attempt.round is None)


def order_of(attempt: Attempt) -> tuple[int, bool, int]:
    """Return the sort key: the end of an attempt comes after those of its rounds."""
    return attempt.number, attempt.round is None, attempt.round or 0
