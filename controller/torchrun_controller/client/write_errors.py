"""Errors of reads and writes of objects, as the controllers distinguish them."""

from torchrun_controller.client.errors import ApiError
from torchrun_controller.reconcile.model.observed import Conflict, Rejection


class NameConflictError(Exception):
    """Another object, not ours, has the name; nothing was written to it."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(conflict.message)
        self.conflict = conflict


class RejectedError(Exception):
    """The API server refuses the object.

    If `permanent`, only a changed object can succeed. 403 is not permanent: a quota, a webhook or a
    role may change at any time. Neither is 500 for a webhook that does not answer.
    """

    def __init__(self, rejection: Rejection, *, permanent: bool) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection
        self.permanent = permanent


class UnavailableError(Exception):
    """429, 5xx or no answer: retry, not before `retry_after` seconds if that is set."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SupersededError(Exception):
    """An object that the Plan is based on has changed: observe and decide again."""


def raise_if_unavailable(error: ApiError) -> None:
    """Raise UnavailableError for 429 and 5xx."""
    if error.status == 429 or error.status >= 500:
        raise UnavailableError(error.message, error.retry_after) from error
