"""What the API server refuses of each job: objects and statuses, not repeated for a while.

A refusal of one object does not affect the others. Reconcile reports all current refusals in the
status; their writes are skipped, and all others are sent. A refused status, as of a job that is too
large, is used as if written.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.client import ApiError
from torchrun_controller.client.write_errors import NameConflictError, RejectedError
from torchrun_controller.controllers.controller import FORBIDDEN_RETRY
from torchrun_controller.reconcile.job.refusals import Identity, identity
from torchrun_controller.reconcile.model.conditions import ADMITTED
from torchrun_controller.reconcile.model.observed import (
    Conflict,
    Observed,
    RefusedWrites,
    Rejection,
)
from torchrun_controller.reconcile.model.plan import Apply, Delete

CONFLICT_RETRY = 30.0  # seconds until a taken name is tried again
# Seconds until an invalid object is retried without a change: admission policies and webhooks also
# answer that way, and may change.
REJECTED_RETRY = 300.0
# Each retry of a job without a gang takes its quota from others for a moment: the delay doubles.
LONGEST_RETRY = 3600.0
STATUS_RETRY = 300.0  # seconds until a refused status is sent again
# HTTP codes of a refused delete that only a change of a permission, policy or webhook resolves.
REFUSED_DELETE = frozenset({400, 403, 422})

Refusal: TypeAlias = Conflict | Rejection

K = TypeVar("K", bound=Hashable)


class _Memory(Struct):
    """The refusals of one job, each with the time until which it is not sent again.

    `delays` also has those whose time is over, with the seconds of their last delay.
    """

    generations: tuple[object, ...]  # UIDs and generations of job and queue
    refusals: dict[Identity, tuple[Refusal, float]]
    delays: dict[Identity, float]


class Refusals(Generic[K]):
    """The current refusals of each key. Bounded by the existing jobs.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._memories: dict[K, _Memory] = {}

    def with_refusals(self, key: K, observed: Observed) -> Observed:
        """Return the observed job with its refusals; drop those whose write may be repeated."""
        memory = self._memories.get(key)
        if memory is None:
            return observed
        now, generations = self._clock(), _generations(observed)
        active = {write: entry for write, entry in memory.refusals.items() if entry[1] > now}
        if memory.generations != generations:
            del self._memories[key]
            return observed
        memory.refusals = active
        refusals = [refusal for refusal, _ in active.values()]
        conflicts = tuple(refusal for refusal in refusals if isinstance(refusal, Conflict))
        rejections = tuple(refusal for refusal in refusals if isinstance(refusal, Rejection))
        conflicts = (*conflicts, *observed.refused.conflicts)
        return replace(observed, refused=RefusedWrites(conflicts=conflicts, rejections=rejections))

    def is_refused(self, key: K, write: Apply | Delete) -> bool:
        """Whether this write is refused and must not be repeated yet."""
        memory = self._memories.get(key)
        return memory is not None and identity(write) in memory.refusals

    def add(self, key: K, observed: Observed, write: Apply | Delete, error: Exception) -> None:
        """Store an error for which `is_refusal` is true."""
        refusal, seconds = _to_refusal(write, error)
        generations = _generations(observed)
        memory = self._memories.setdefault(key, _Memory(generations, {}, {}))
        memory.generations = generations
        write_id = identity(write)
        delay = seconds
        if not observed.gang.child_jobs:
            delay = max(seconds, min(2 * memory.delays.get(write_id, 0.0), LONGEST_RETRY))
        memory.delays[write_id] = delay
        memory.refusals[write_id] = (refusal, self._clock() + delay)

    def next_retry(self, key: K) -> float | None:
        """Return the seconds until the next refused write may be repeated; None without one."""
        memory = self._memories.get(key)
        if memory is None or not memory.refusals:
            return None
        return max(0.0, min(until for _, until in memory.refusals.values()) - self._clock())

    def forget(self, key: K) -> None:
        """Drop the refusals of a deleted job."""
        self._memories.pop(key, None)


def is_refusal(error: Exception, write: Apply | Delete) -> bool:
    """Whether the error concerns this object alone and repeats until something changes."""
    if isinstance(error, ApiError):
        return isinstance(write, Delete) and error.status in REFUSED_DELETE
    return isinstance(error, NameConflictError | RejectedError)


def _to_refusal(write: Apply | Delete, error: Exception) -> tuple[Refusal, float]:
    """Return the refusal for reconcile, and the seconds until the write is repeated."""
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


def _generations(observed: Observed) -> tuple[object, ...]:
    """Return UID and generation of job and queue: a change of these drops the refusals."""
    job, queue = observed.job.metadata, observed.queue
    queue_generation = (queue.metadata.uid, queue.metadata.generation) if queue is not None else ()
    return (job.uid, job.generation, *queue_generation)


class _Refused(Struct):
    """A status of the object with this UID, and the time until which it is not sent again."""

    uid: str
    status: TorchrunJobStatus
    until: float


class UnwrittenStatuses(Generic[K]):
    """The refused status of each key. Bounded by the existing jobs. `clock` is in seconds.

    Without them a suspension or a deadline would wait for ever: both first record the end of the
    gang. Lost with the process; the next leader goes on from the status in the API.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: dict[K, _Refused] = {}

    def with_status(self, key: K, observed: Observed) -> Observed:
        """Return the observed job with its refused status, and what admission wrote since."""
        refused, present = self._refused.get(key), observed.job.status
        if refused is None or refused.uid != observed.job.metadata.uid:
            self.forget(key)
            return observed
        admitted = tuple(c for c in present.conditions if c.type == ADMITTED)
        status = replace(
            refused.status,
            conditions=(*refused.status.conditions, *admitted),
            admission=present.admission,
            queue_position=present.queue_position,
        )
        return replace(observed, job=replace(observed.job, status=status))

    def to_write(
        self, key: K, job: TorchrunJob, status: TorchrunJobStatus | None
    ) -> TorchrunJobStatus | None:
        """Return the status to send now: this one, or a refused one whose time is over.

        A new phase is sent at once. The others are kept until the next time.
        """
        refused = self._refused.get(key)
        if refused is None:
            return status
        if status is not None:
            refused.status = status
        is_new_phase = refused.status.phase != job.status.phase
        return refused.status if is_new_phase or refused.until <= self._clock() else None

    def keep(self, key: K, job: TorchrunJob, status: TorchrunJobStatus) -> None:
        """Keep a status that was refused."""
        self._refused[key] = _Refused(job.metadata.uid, status, self._clock() + STATUS_RETRY)

    def next_retry(self, key: K) -> float | None:
        """Return the seconds until the refused status is sent again; None without one."""
        refused = self._refused.get(key)
        return None if refused is None else max(0.0, refused.until - self._clock())

    def forget(self, key: K) -> None:
        """Drop the status: it is written, or the job is gone."""
        self._refused.pop(key, None)
