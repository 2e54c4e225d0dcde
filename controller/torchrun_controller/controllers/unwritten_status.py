"""Statuses that the API server refuses, as for a job that is too large: used as if written.

Without them a suspension or a deadline would wait for ever: both first record the end of the gang.
Lost with the process; the next leader goes on from the status in the API.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torchrun_api.job import TorchrunJob
from torchrun_api.status import TorchrunJobStatus
from torchrun_controller.reconcile.model.conditions import ADMITTED
from torchrun_controller.reconcile.model.observed import Observed

RETRY = 300.0  # seconds

K = TypeVar("K", bound=Hashable)


class _Refused(Struct):
    """A status of the object with this UID, and the time until which it is not sent again."""

    uid: str
    status: TorchrunJobStatus
    until: float


class UnwrittenStatuses(Generic[K]):
    """The refused status of each key. Bounded by the existing jobs. `clock` is in seconds."""

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
        self._refused[key] = _Refused(job.metadata.uid, status, self._clock() + RETRY)

    def next_retry(self, key: K) -> float | None:
        """Return the seconds until the refused status is sent again; None without one."""
        refused = self._refused.get(key)
        return None if refused is None else max(0.0, refused.until - self._clock())

    def forget(self, key: K) -> None:
        """Drop the status: it is written, or the job is gone."""
        self._refused.pop(key, None)
