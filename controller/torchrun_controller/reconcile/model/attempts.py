"""The ends of attempts that the status records."""

from collections.abc import Iterable

from torchrun_api.status import Attempt


def find_end(attempts: Iterable[Attempt], number: int) -> Attempt | None:
    """Return the end of the attempt of this number; None if `attempts` do not record it."""
    return next((attempt for attempt in attempts if attempt.number == number), None)
