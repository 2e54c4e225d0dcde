"""Leader election as a pure state machine: the holder of the Lease, and the next action.

The local clock decides the expiry: a lease is expired when its record has not changed for its
leaseDurationSeconds. Clocks of other machines and changes of metadata do not count. A *deleted*
lease is not released: its holder may still write, and has the rest of the duration to create the
lease again.
"""

import math
from datetime import UTC, datetime
from typing import TypeAlias

from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds.meta import ObjectMeta, Wire
from torchrun_api.kinds.resources import Kind

# Seconds. A larger leaseDurationSeconds is not from this controller; larger sums may overflow.
_MAX_DURATION = 86_400


class LeaseSpec(Wire, frozen=True, kw_only=True):
    """The record. `renew_time` is only compared: it comes from another machine's clock."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Wire, frozen=True, kw_only=True):
    """coordination.k8s.io/v1 Lease."""

    metadata: ObjectMeta = ObjectMeta()
    spec: LeaseSpec = LeaseSpec()


LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease", Lease)


class Durations(Struct, frozen=True):
    """Durations in seconds, and the jitter factor of a standby.

    Raises ValueError for durations that do not ensure a single leader.
    """

    lease: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0
    jitter: float = 1.2

    @property
    def grace(self) -> float:
        """The seconds for a write that began at the renew deadline to arrive."""
        return self.lease - self.renew_deadline

    def __post_init__(self) -> None:
        if self.lease < 1:
            raise ValueError("the lease duration must be at least 1 s")
        if self.lease <= self.renew_deadline:
            raise ValueError("the lease duration must be longer than the renew deadline")
        if self.retry <= 0 or self.renew_deadline <= self.retry * max(self.jitter, 1.0):
            raise ValueError(
                f"the renew deadline must be longer than {max(self.jitter, 1.0):g} times the retry "
                "period, and that above 0"
            )


class LeasePause(Struct, frozen=True):
    """Sleep for this many seconds, or until the lease changes."""

    seconds: float


class ReadLease(Struct, frozen=True):
    """GET the lease."""


class WriteLease(Struct, frozen=True):
    """Write this process into the lease; `version` is its resourceVersion, "" to create it."""

    version: str


class LeaseLost(Struct, frozen=True):
    """The lease is lost for good."""

    reason: str


Decision: TypeAlias = LeasePause | ReadLease | WriteLease | LeaseLost


class Election:
    """The state machine. Times are seconds of one monotonic clock; no I/O, no randomness.

    The driver carries out what `decide` returns. It calls `unsure` before a request, and `read`,
    `absent` or `renewed` with the result, but nothing after a failure. `jitter` is random in
    [0, 1).
    """

    def __init__(self, identity: str, durations: Durations) -> None:
        self.identity = identity
        self.durations = durations
        self._record = LeaseSpec()  # the newest one; stays after a deletion
        self._version = 0  # resourceVersion of the newest state
        self._present = False
        self._current = False  # whether no unconfirmed write of ours follows that state
        self._changed_at = -math.inf  # when the record last changed
        self._renewed_at: float | None = (
            None  # when the last successful write was sent; None for a standby
        )
        self._next_request = -math.inf  # limits retries, and the leader's renewals
        self._next_read = -math.inf  # limits a standby's polling

    @property
    def holder(self) -> str:
        """Identity of the last known holder, "" for none."""
        return self._record.holder_identity or ""

    @property
    def current(self) -> bool:
        """Whether a write may use the known state; otherwise the lease must be read again."""
        return self._current

    @property
    def version(self) -> str:
        """resourceVersion of the known state, "" if the lease does not exist."""
        return str(self._version) if self._present else ""

    def writable_until(self) -> float:
        """Return the time until which writes may begin; minus infinity on a standby."""
        if self._renewed_at is None or self.holder != self.identity:
            return -math.inf
        return self._renewed_at + self.durations.renew_deadline

    def unsure(self, sent_at: float, jitter: float) -> None:
        """Record that a request is sent. Until its response, it may or may not have happened."""
        self._current = False
        self._next_request = sent_at + self.pace(jitter)

    def read(self, lease: Lease, now: float, jitter: float) -> None:
        """Record a lease from a GET, even an older version: etcd may have been restored.

        Raises ValueError if its resourceVersion is not a number.
        """
        self._take(int(lease.metadata.resource_version), lease.spec, now)
        self._next_read = now + self.pace(jitter)
        self._next_request = -math.inf

    def absent(self, now: float, jitter: float) -> None:
        """Record that a GET returned 404."""
        self._present, self._current = False, True
        self._next_read = now + self.pace(jitter)
        self._next_request = -math.inf

    def watched(self, lease: Lease, now: float) -> None:
        """Record a lease from the watch; an older version is ignored.

        Raises ValueError if its resourceVersion is not a number.
        """
        version = int(lease.metadata.resource_version)
        if version >= self._version:
            self._take(version, lease.spec, now)

    def deleted(self, version: int) -> None:
        """Record that the lease was deleted; ignored if a newer state is known."""
        if version >= self._version:
            self._version, self._present, self._current = version, False, True

    def renewed(self, lease: Lease, sent_at: float, now: float) -> None:
        """Record the response to a write. Raises ValueError for another holder."""
        if lease.spec.holder_identity != self.identity:
            raise ValueError(f"the answer names the holder {lease.spec.holder_identity!r}")
        self._take(int(lease.metadata.resource_version), lease.spec, now)
        self._renewed_at = sent_at
        self._next_request = sent_at + self.durations.retry

    def resign(self) -> None:
        """Allow no more writes."""
        self._renewed_at = -math.inf

    def decide(self, now: float) -> Decision:
        """Return the next action."""
        deadline = math.inf
        if self._renewed_at is not None:
            if self.holder != self.identity:
                return LeaseLost(f"{self.holder or 'nobody'} holds it now")
            deadline = self._renewed_at + self.durations.renew_deadline
            if now >= deadline:
                return LeaseLost(f"it was not renewed within {self.durations.renew_deadline:g} s")
        if now < self._next_request:
            return LeasePause(min(self._next_request, deadline) - now)
        if not self._current:
            return ReadLease()
        if self._renewed_at is not None or now >= self._free_at():
            return WriteLease(self.version)
        if now >= self._next_read:
            return ReadLease()
        return LeasePause(min(self._next_read, self._free_at()) - now)

    def record(self, wall: datetime) -> JsonObject:
        """Return the spec that makes this process the holder, at this time of day."""
        timestamp = _format_time(wall)
        spec: JsonObject = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self.durations.lease),
            "renewTime": timestamp,
        }
        is_takeover = self.holder != self.identity
        if is_takeover or not self._present:
            transitions = int(is_takeover and self._record != LeaseSpec())
            spec["acquireTime"] = timestamp
            spec["leaseTransitions"] = (self._record.lease_transitions or 0) + transitions
        return spec

    def vacancy(self, wall: datetime) -> JsonObject:
        """Return the spec of a released lease."""
        return {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _format_time(wall)}

    def pace(self, jitter: float) -> float:
        """Return the seconds between two requests, or between two reads of a standby."""
        return self.durations.retry * (1.0 + self.durations.jitter * jitter)

    def _take(self, version: int, record: LeaseSpec, now: float) -> None:
        if record != self._record:
            self._changed_at = now
        self._record, self._version = record, version
        self._present = self._current = True

    def _free_at(self) -> float:
        if self.holder in ("", self.identity):
            return -math.inf
        duration = self._record.lease_duration_seconds or 0
        return self._changed_at + (
            min(duration, _MAX_DURATION) if duration > 0 else self.durations.lease
        )


def _format_time(wall: datetime) -> str:
    return wall.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
