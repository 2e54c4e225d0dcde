"""Leader election as a pure state machine: who holds the Lease, and what to do next.

The local clock decides over expiry: a holder counts as gone when its record has not changed for the
duration that it names. Clocks of other machines do not matter, nor do changes of metadata. A
*deleted* lease is no release: its holder may still work, and has the rest of the duration to create
the lease again.
"""

import math
from datetime import UTC, datetime
from typing import TypeAlias

from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds import Kind
from torchrun_api.meta import ObjectMeta, Wire

# Seconds. A larger leaseDurationSeconds is not from this controller; larger sums may overflow.
_LONGEST = 86_400


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
    """Seconds, and a standby's jitter factor. Raises ValueError if they cannot work."""

    lease: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0
    jitter: float = 1.2

    @property
    def grace(self) -> float:
        """Seconds left for a write that began at the renew deadline."""
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


class Wait(Struct, frozen=True):
    """Nothing to do for this many seconds, unless the lease changes."""

    seconds: float


class Read(Struct, frozen=True):
    """GET the lease."""


class Write(Struct, frozen=True):
    """Write this process into the lease; `version` is its resourceVersion, "" if it is absent."""

    version: str


class Lost(Struct, frozen=True):
    """The lease is lost for good."""

    reason: str


Decision: TypeAlias = Wait | Read | Write | Lost


class Election:
    """The state machine. Times are seconds of one monotonic clock; no I/O, no randomness.

    Call `decide` and carry out what it returns: call `unsure` before a request, and `read`,
    `absent` or `renewed` with its result, nothing after a failure. `jitter` is random in [0, 1).
    """

    def __init__(self, identity: str, durations: Durations) -> None:
        self.identity = identity
        self.durations = durations
        self._record = LeaseSpec()  # the newest one seen; stays after a deletion
        self._version = 0  # of the newest state seen
        self._present = False
        self._current = False  # whether no write of ours may have happened since that state
        self._changed_at = -math.inf  # when the record last changed
        self._renewed_at: float | None = None  # when the last good write was sent; None: a standby
        self._next_request = -math.inf  # paces failures, and the leader's renewals
        self._next_read = -math.inf  # paces a standby's polling

    @property
    def holder(self) -> str:
        """Identity of the holder that was last seen, "" for nobody."""
        return self._record.holder_identity or ""

    @property
    def current(self) -> bool:
        """Whether the state last seen can be written upon; else it is to be read again."""
        return self._current

    @property
    def version(self) -> str:
        """resourceVersion of the state last seen, "" where the lease is absent."""
        return str(self._version) if self._present else ""

    def writable_until(self) -> float:
        """The time until which writes may begin; minus infinity on a standby."""
        if self._renewed_at is None or self.holder != self.identity:
            return -math.inf
        return self._renewed_at + self.durations.renew_deadline

    def unsure(self, sent: float, jitter: float) -> None:
        """Note that a request is sent: until its answer, it may or may not have happened."""
        self._current = False
        self._next_request = sent + self.pace(jitter)

    def read(self, lease: Lease, now: float, jitter: float) -> None:
        """Note a lease that was read, even an older one: etcd may have been restored.

        Raises ValueError if its resourceVersion is not a number.
        """
        self._take(int(lease.metadata.resource_version), lease.spec, now)
        self._next_read = now + self.pace(jitter)
        self._next_request = -math.inf

    def absent(self, now: float, jitter: float) -> None:
        """Note that a read found no lease."""
        self._present, self._current = False, True
        self._next_read = now + self.pace(jitter)
        self._next_request = -math.inf

    def watched(self, lease: Lease, now: float) -> None:
        """Note a state that a watch delivered; one older than the last is ignored.

        Raises ValueError if its resourceVersion is not a number.
        """
        version = int(lease.metadata.resource_version)
        if version >= self._version:
            self._take(version, lease.spec, now)

    def deleted(self, version: int) -> None:
        """Note that the lease was deleted; ignored if a newer state is known."""
        if version >= self._version:
            self._version, self._present, self._current = version, False, True

    def renewed(self, lease: Lease, sent: float, now: float) -> None:
        """Note the answer to a write sent at `sent`. Raises ValueError for another holder."""
        if lease.spec.holder_identity != self.identity:
            raise ValueError(f"the answer names the holder {lease.spec.holder_identity!r}")
        self._take(int(lease.metadata.resource_version), lease.spec, now)
        self._renewed_at = sent
        self._next_request = sent + self.durations.retry

    def resign(self) -> None:
        """Allow no more writes."""
        self._renewed_at = -math.inf

    def decide(self, now: float) -> Decision:
        """Return what to do now."""
        until = math.inf
        if self._renewed_at is not None:
            if self.holder != self.identity:
                return Lost(f"{self.holder or 'nobody'} holds it now")
            until = self._renewed_at + self.durations.renew_deadline
            if now >= until:
                return Lost(f"it was not renewed within {self.durations.renew_deadline:g} s")
        if now < self._next_request:
            return Wait(min(self._next_request, until) - now)
        if not self._current:
            return Read()
        if self._renewed_at is not None or now >= self._free_at():
            return Write(self.version)
        if now >= self._next_read:
            return Read()
        return Wait(min(self._next_read, self._free_at()) - now)

    def record(self, wall: datetime) -> JsonObject:
        """The spec to write as the holder, at this time of day."""
        moment = _micro_time(wall)
        spec: JsonObject = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self.durations.lease),
            "renewTime": moment,
        }
        taken = self.holder != self.identity
        if taken or not self._present:
            changes = int(taken and self._record != LeaseSpec())
            spec["acquireTime"] = moment
            spec["leaseTransitions"] = (self._record.lease_transitions or 0) + changes
        return spec

    def vacancy(self, wall: datetime) -> JsonObject:
        """The spec to write at the end: without a holder."""
        return {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro_time(wall)}

    def pace(self, jitter: float) -> float:
        """Seconds between two attempts, or between two reads of a standby."""
        return self.durations.retry * (1.0 + self.durations.jitter * jitter)

    def _take(self, version: int, record: LeaseSpec, now: float) -> None:
        if record != self._record:
            self._changed_at = now
        self._record, self._version = record, version
        self._present = self._current = True

    def _free_at(self) -> float:
        if self.holder in ("", self.identity):
            return -math.inf
        named = self._record.lease_duration_seconds or 0
        return self._changed_at + (min(named, _LONGEST) if named > 0 else self.durations.lease)


def _micro_time(wall: datetime) -> str:
    return wall.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
