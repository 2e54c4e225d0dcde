"""Refused writes of each job: shown to reconcile, and not sent again for a while.

A refusal of one object does not affect the others. Reconcile sees all present refusals, reports
them in the status, leaves these writes out, and decides the rest as usual.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import NameConflictError, RejectedError
from torchrun_controller.controllers.controller import FORBIDDEN_RETRY
from torchrun_controller.reconcile.job.refusals import Identity, identity
from torchrun_controller.reconcile.model.observed import (
    Conflict,
    Observed,
    RefusedWrites,
    Rejection,
)
from torchrun_controller.reconcile.model.plan import Apply, Delete

CONFLICT_RETRY = 30.0  # seconds until a name that another object has is tried again
# Seconds until an invalid object is retried without a change: admission policies and webhooks also
# answer that way, and may change.
REJECTED_RETRY = 300.0
# HTTP codes of a refused delete that stay until a permission, a policy or a webhook changes.
REFUSED_DELETE = frozenset({400, 403, 422})

Refused: TypeAlias = Conflict | Rejection

K = TypeVar("K", bound=Hashable)


class _Memory(Struct):
    """The refusals of one job, each with the time until which it is not sent again."""

    made_from: tuple[object, ...]  # see `_made_from`
    refused: dict[Identity, tuple[Refused, float]]


class Refusals(Generic[K]):
    """The present refusals of each key. Holds keys of existing jobs only.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._memories: dict[K, _Memory] = {}

    def show(self, key: K, observed: Observed) -> Observed:
        """Return the observed job with its refusals; drop those that may be sent again."""
        memory = self._memories.get(key)
        if memory is None:
            return observed
        now, made_from = self._clock(), _made_from(observed)
        kept = {what: told for what, told in memory.refused.items() if told[1] > now}
        if memory.made_from != made_from or not kept:
            del self._memories[key]
            return observed
        memory.refused = kept
        told = [refused for refused, _ in kept.values()]
        conflicts = tuple(each for each in told if isinstance(each, Conflict))
        rejections = tuple(each for each in told if isinstance(each, Rejection))
        conflicts = (*conflicts, *observed.refused.conflicts)
        return replace(observed, refused=RefusedWrites(conflicts=conflicts, rejections=rejections))

    def holds(self, key: K, write: Apply | Delete) -> bool:
        """Whether this write must not be sent yet."""
        memory = self._memories.get(key)
        return memory is not None and identity(write) in memory.refused

    def add(self, key: K, observed: Observed, write: Apply | Delete, error: Exception) -> None:
        """Remember an error for which `is_refusal` is true."""
        refused, seconds = _refused(write, error)
        made_from = _made_from(observed)
        memory = self._memories.setdefault(key, _Memory(made_from, {}))
        memory.made_from = made_from
        memory.refused[identity(write)] = (refused, self._clock() + seconds)

    def left(self, key: K) -> float | None:
        """Return the seconds until the next refused write is retried; None if there is none."""
        memory = self._memories.get(key)
        if memory is None:
            return None
        return max(0.0, min(until for _, until in memory.refused.values()) - self._clock())

    def forget(self, key: K) -> None:
        """Drop the refusals of a deleted job."""
        self._memories.pop(key, None)


def is_refusal(error: Exception, write: Apply | Delete) -> bool:
    """Whether the error is about this object alone and stays until something changes."""
    if isinstance(error, ApiError):
        return isinstance(write, Delete) and error.status in REFUSED_DELETE
    return isinstance(error, NameConflictError | RejectedError)


def _refused(write: Apply | Delete, error: Exception) -> tuple[Refused, float]:
    """The refusal as reconcile sees it, and the seconds until the write is retried."""
    match error:
        case NameConflictError():
            return error.conflict, CONFLICT_RETRY
        case RejectedError():
            return error.rejection, REJECTED_RETRY if error.permanent else FORBIDDEN_RETRY
        case ApiError():
            rejection = Rejection(write.kind.resource, write.name, error.message, verb="delete")
            return rejection, FORBIDDEN_RETRY
        case _:
            raise TypeError(f"{error!r} is no refusal")


def _made_from(observed: Observed) -> tuple[object, ...]:
    """Identity and generation of job and queue: a change of these may end a refusal."""
    job, queue = observed.job.metadata, observed.queue
    of_queue = (queue.metadata.uid, queue.metadata.generation) if queue is not None else ()
    return (job.uid, job.generation, *of_queue)
