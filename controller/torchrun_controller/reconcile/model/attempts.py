"""The ends of attempts and of their rounds that the status records."""

from collections.abc import Iterable
from typing import TypeAlias

from torchrun_api.status import Attempt


def find_end(attempts: Iterable[Attempt], number: int) -> Attempt | None:
    """Return the end of the attempt of this number; None if `attempts` do not record it."""
    return next((end for end in whole_attempts(attempts) if end.number == number), None)


def whole_attempts(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the ends of whole attempts, without those of rounds."""
    return tuple(end for end in attempts if end.round is None)


Order: TypeAlias = tuple[int, bool, int]


def order_of(attempt: Attempt) -> Order:
    """Return the sort key, which no other end has: rounds come before the end of their attempt."""
    return attempt.number, attempt.round is None, attempt.round or 0


def keep_last(
    recorded_ends: tuple[Attempt, ...], new_ends: tuple[Attempt, ...], most: int
) -> tuple[Attempt, ...]:
    """Return the last ends of attempts and rounds, at most `most`, each as first recorded."""
    by_order = {order_of(end): end for end in (*new_ends, *recorded_ends)}
    return tuple(by_order[order] for order in sorted(by_order))[-most:]
