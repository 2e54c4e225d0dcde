"""What the API server refused of each job: shown to reconcile, and not sent again for a while.

One refused object says nothing of the others. Reconcile sees all present refusals, says them in the
status, leaves these writes out and decides the rest as usual.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torchrun_controller.client import ApiError
from torchrun_controller.client.apply import NameConflictError, RejectedError
from torchrun_controller.controllers.controller import FORBIDDEN_RETRY
from torchrun_controller.reconcile.job.refusals import Identity, identity
from torchrun_controller.reconcile.model.observed import Conflict, Observed, Rejection
from torchrun_controller.reconcile.model.plan import Apply, Delete

CONFLICT_RETRY = 30.0  # seconds until a name that somebody else holds is tried again
# Seconds until an object that the API server calls invalid is tried again although nothing of it
# has changed: admission policies and webhooks answer so too, and change by themselves.
REJECTED_RETRY = 300.0
# Answers to a delete that stay the same until a right, a policy or a webhook changes.
REFUSED_DELETE = frozenset({400, 403, 422})

Refused: TypeAlias = Conflict | Rejection

K = TypeVar("K", bound=Hashable)


class _Memory(Struct):
    """Of one job: what was refused, and until when by the clock it is not sent again."""

    made_from: tuple[object, ...]  # see `_made_from`
    refused: dict[Identity, tuple[Refused, float]]


class Refusals(Generic[K]):
    """The present refusals of each key. Holds keys of jobs that are there, no others.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._memories: dict[K, _Memory] = {}

    def show(self, key: K, observed: Observed) -> Observed:
        """Add the refusals that still stand; forget the others, which may be sent again."""
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
        return replace(observed, conflicts=(*conflicts, *observed.conflicts), rejections=rejections)

    def holds(self, key: K, write: Apply | Delete) -> bool:
        """Whether this write is not to be sent yet."""
        memory = self._memories.get(key)
        return memory is not None and identity(write) in memory.refused

    def add(self, key: K, observed: Observed, write: Apply | Delete, error: Exception) -> None:
        """Remember a refusal, as `is_refusal` knows it."""
        refused, seconds = _refused(write, error)
        made_from = _made_from(observed)
        memory = self._memories.setdefault(key, _Memory(made_from, {}))
        memory.made_from = made_from
        memory.refused[identity(write)] = (refused, self._clock() + seconds)

    def left(self, key: K) -> float | None:
        """Return the seconds until the next refused write is tried again; None if there is none."""
        memory = self._memories.get(key)
        if memory is None:
            return None
        return max(0.0, min(until for _, until in memory.refused.values()) - self._clock())

    def forget(self, key: K) -> None:
        """The job is gone."""
        self._memories.pop(key, None)


def is_refusal(error: Exception, write: Apply | Delete) -> bool:
    """Whether the answer is about this object alone, and the same until something changes."""
    if isinstance(error, ApiError):
        return isinstance(write, Delete) and error.status in REFUSED_DELETE
    return isinstance(error, NameConflictError | RejectedError)


def _refused(write: Apply | Delete, error: Exception) -> tuple[Refused, float]:
    """The refusal as reconcile sees it, and the seconds until the write is tried again."""
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
    """Identity and generation of what users write: a change of these may end a refusal."""
    job, queue = observed.job.metadata, observed.queue
    of_queue = (queue.metadata.uid, queue.metadata.generation) if queue is not None else ()
    return (job.uid, job.generation, *of_queue)
