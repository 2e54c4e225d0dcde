"""The outcome of a call from its events so far: a state machine without I/O or clock."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchrun_sdk.call.peer_loss import PEER_WAIT, is_peer_loss
from torchrun_sdk.cluster.manifest import TERMINAL_PHASES
from torchrun_sdk.errors import (
    CallError,
    CallTimeout,
    Evicted,
    IncompatiblePython,
    JobFailed,
    LaunchTimeout,
    OutOfMemory,
    QuorumTimeout,
    RankExited,
    remote_exception,
)
from torchrun_sdk.spec import RAISED, Exited, Frame, Raised, Removed, Result, Started

# Seconds after the first exception: earlier ones of other nodes may still arrive.
_EARLIER = 1.0
# Seconds after the end of the job, for results and exceptions that still arrive.
_LATE = 3.0
# Seconds after the last result: the ranks end when the client has acknowledged theirs.
_COMPLETE = 60.0

# Reason of a JobFailed: the job succeeded without sending its results.
MISSING = "ResultsMissing"
_QUORUM = f"{QuorumTimeout.__module__}.{QuorumTimeout.__qualname__}"

# Seconds: a process that exits makes the other ranks fail within this time.
_PEER_LOSS = 0.5


class CallLimits(NamedTuple):
    """Seconds until all pods run, until every rank has started, until every rank has returned."""

    launch: float
    quorum: float
    call: float | None = None


class Wait(NamedTuple):
    """Wait for the next event, at most this number of seconds."""

    seconds: float


class CallState:
    """Feed it `job_changed`, `job_deleted` and `add_frame`, then call `decide`.

    Times are seconds of one clock. stays: the pods stay for another call, so that the job does not
    end with this one. from_storage: the frames were read from the PVC, so their times are unknown.
    """

    def __init__(
        self,
        name: str,
        limits: CallLimits,
        now: float,
        *,
        stays: bool = False,
        from_storage: bool = False,
    ) -> None:
        self.name = name
        self.attempt = 0
        self._limits = limits
        self.stays = stays
        self._from_storage = from_storage
        self._since = now
        self._status: dict[str, Any] = {}
        self._deleted = False
        self._ended_at: float | None = None
        self._frames_ahead: list[tuple[int, Frame, float]] = []
        self._reset()

    def _reset(self) -> None:
        self._started: dict[int, Started] = {}
        self._results: dict[int, Result] = {}
        self._raised: dict[int, Raised | Exited] = {}
        self._removed: set[int] = set()
        self._ended_by_rank: dict[int, float] = {}
        self._first_at: float | None = None
        self._all_at: float | None = None
        self._raised_at: float | None = None
        self._done_at: float | None = None
        self._has_run = False

    @property
    def phase(self) -> str:
        """The phase of the job; "" before the first."""
        return str(self._status.get("phase") or "")

    @property
    def status(self) -> dict[str, Any]:
        """The job's last known status."""
        return self._status

    @property
    def is_deleted(self) -> bool:
        """Whether the job was deleted."""
        return self._deleted

    @property
    def may_have_kept_frames(self) -> bool:
        """Whether the job ended with results or an exception that did not arrive."""
        last = self._status.get("lastFailure") or {}
        stored = self.phase == "Succeeded" or last.get("exitCode") == RAISED
        has_ended = self.phase in TERMINAL_PHASES and not self._deleted
        return has_ended and stored and not self._raised

    @property
    def world(self) -> int:
        """The number of ranks, 0 before any has started."""
        return max((frame.world_size for frame in self._started.values()), default=0)

    def job_changed(self, status: dict[str, Any], now: float) -> None:
        """The job's status has changed."""
        self._status = status
        attempt = int(status.get("attempt") or 0)
        if attempt > self.attempt:
            self.attempt = attempt
            self._reset()
            self._since = now
            ahead, self._frames_ahead = self._frames_ahead, []
            for number, frame, received in ahead:
                if isinstance(frame, (Raised, Exited)):
                    frame = frame._replace(age=frame.age + now - received)
                self.add_frame(number, frame, now)
        self._has_run = self._has_run or self.phase == "Running"
        if self.phase in TERMINAL_PHASES and self._ended_at is None:
            self._ended_at = now

    def job_deleted(self, now: float) -> None:
        """The job is gone."""
        self._deleted = True
        if self._ended_at is None:  # may be called several times
            self._ended_at = now

    def add_frame(self, attempt: int, frame: Frame, now: float) -> None:
        """A frame of a rank of this attempt; frames of earlier attempts are ignored."""
        if attempt > self.attempt:  # the status of the job may be older than its pods
            self._frames_ahead.append((attempt, frame, now))
        if attempt != self.attempt:
            return
        if isinstance(frame, Started):
            self._on_start(frame, now)
        elif isinstance(frame, Result):
            self._results[frame.rank] = frame
        elif isinstance(frame, Removed):
            self._removed.add(frame.rank)
        else:
            self._raised[frame.rank] = frame
            self._ended_by_rank.setdefault(frame.rank, now - max(frame.age, 0.0))
            self._raised_at = self._raised_at or now
        world = self.world
        if world and len(self._started) == world and self._all_at is None:
            self._all_at = now
        if world and len(self._results) == world and self._done_at is None:
            self._done_at = now

    def _on_start(self, frame: Started, now: float) -> None:
        before = self._started.get(frame.rank)
        if before is not None and _is_later(frame, before):
            # torchrun restarted its ranks: the earlier frames of this one do not count.
            self._results.pop(frame.rank, None)
            self._raised.pop(frame.rank, None)
            self._ended_by_rank.pop(frame.rank, None)
            self._done_at = None
            if not self._raised:
                self._raised_at = None
        self._started[frame.rank] = frame
        self._first_at = self._first_at or now

    def decide(self, now: float) -> Wait | list[Result] | CallError:
        """The results sorted by rank, the error, or how long to wait for more."""
        if self._done_at is not None:
            complete = self.stays or self.phase == "Succeeded"
            if complete or now - self._done_at >= _COMPLETE:
                return [self._results[rank] for rank in sorted(self._results)]
            if self._ended_at is None:
                return Wait(self._done_at + _COMPLETE - now)
        if self._raised_at is not None:
            if self._awaits_next_gang():
                return self._within_limits(now)
            cause_at = self._cause_at(self._raised_at)
            return self._exception() if now >= cause_at else Wait(cause_at - now)
        if missing := self._removed - self._results.keys():
            return self._lost_result(min(missing))
        if self._ended_at is not None:
            if now - self._ended_at >= _LATE:
                return self._failure()
            return Wait(self._ended_at + _LATE - now)
        return self._within_limits(now)

    def _lost_result(self, rank: int) -> CallError:
        return CallError(
            f"Another client has read the result of rank {rank} of job {self.name}, and a later"
            " call has removed it. Call the function again.",
            job=self.name,
            rank=rank,
        )

    def _has_cause(self) -> bool:
        """Whether a rank has ended by itself, not because it lost a peer."""
        ends = self._raised.values()
        return self.world <= 1 or not all(is_peer_loss(end) for end in ends)

    def _awaits_next_gang(self) -> bool:
        """Whether the job starts a new gang, because a peer was lost without a message."""
        is_running = self.phase == "Running" or self._ended_at is not None
        return self._has_run and not is_running and not self._has_cause()

    def _cause_at(self, raised_at: float) -> float:
        """When the first end of a rank is known. A lost peer may be named by the job, or later."""
        earliest = raised_at + _EARLIER
        none_runs = len({*self._raised, *self._results}) == self.world
        if none_runs or self._has_cause():
            return earliest
        if self._ended_at is not None:
            return max(earliest, self._ended_at + _LATE)
        cause_at = raised_at + PEER_WAIT
        if self._all_at is not None and self._limits.call is not None:
            cause_at = min(cause_at, self._all_at + self._limits.call)
        return max(earliest, cause_at)

    def _within_limits(self, now: float) -> Wait | CallError:
        limits = self._limits
        if self._first_at is None:
            remaining = self._since + limits.launch - now
            error: CallError = LaunchTimeout(
                f"Job {self.name} did not run within {limits.launch:g} s: {self._why()}",
                job=self.name,
            )
        elif self._all_at is None:
            remaining = self._first_at + limits.quorum - now
            error = QuorumTimeout(
                f"Only {len(self._started)} of {self.world} ranks of {self.name} started within"
                f" {limits.quorum:g} s: {self._why()}",
                job=self.name,
            )
        elif limits.call is not None:
            remaining = self._all_at + limits.call - now
            missing = sorted({*self._started} - {*self._results})
            error = CallTimeout(
                f"Ranks {', '.join(map(str, missing))} of {self.name} did not return within"
                f" {limits.call:g} s.",
                job=self.name,
            )
        else:
            return Wait(60.0)
        return error if remaining <= 0 else Wait(remaining)

    def _why(self) -> str:
        reason, message = self._status.get("reason"), self._status.get("message")
        return f"{reason}: {message}" if reason else "its status says nothing yet"

    def _exception(self) -> CallError:
        if not self._has_cause() and self._names_other_cause():
            return self._failure()
        first = min(self._raised.values(), key=self._order)
        if isinstance(first, Exited):
            return _exited(self.name, first)
        if first.type == _QUORUM:
            return QuorumTimeout(first.text, job=self.name, rank=first.rank, node=first.node)
        if first.incompatible:
            return IncompatiblePython(first.text, job=self.name, rank=first.rank, node=first.node)
        return remote_exception(
            first.base,
            type=first.type,
            text=first.text,
            traceback=first.traceback,
            job=self.name,
            rank=first.rank,
            node=first.node,
        )

    def _names_other_cause(self) -> bool:
        """Whether the job ended because of anything but an exception of these ranks."""
        last = self._status.get("lastFailure") or {}
        is_other = last.get("rank") not in self._raised and last.get("exitCode") != RAISED
        return self._deleted or (self.phase in TERMINAL_PHASES and bool(last) and is_other)

    def _order(self, end: Raised | Exited) -> tuple[bool, bool, float]:
        """The sort key for which rank ended first. The clocks of two nodes are never compared.

        Running pods send the time since the end of a rank, which the client subtracts from its
        clock. Of a finished job, the rank that the controller names comes first, then the rank that
        ran for the shortest time: ranks of a gang start together. The loss of a peer comes last.
        """
        sooner = _PEER_LOSS if isinstance(end, Exited) else 0.0
        if not self._from_storage:
            return (False, is_peer_loss(end), self._ended_by_rank[end.rank] - sooner)
        cause = (self._status.get("lastFailure") or {}).get("rank")
        return (end.rank != cause, is_peer_loss(end), end.elapsed - sooner)

    def _failure(self) -> CallError:
        if self._deleted:
            return JobFailed(f"Job {self.name} was deleted.", reason="Deleted", job=self.name)
        if self.phase == "Succeeded":
            return JobFailed(
                f"Job {self.name} succeeded, but only {len(self._results)} of"
                f" {self.world or 'all'} results arrived.",
                reason=MISSING,
                job=self.name,
            )
        return failure(self.name, self._status)


def _is_later(frame: Started, before: Started) -> bool:
    """Whether a rank has started again: later by the clock of its node, or on another node."""
    if frame.node != before.node:
        return True
    return (frame.monotonic or frame.time) > (before.monotonic or before.time)


def _exited(name: str, end: Exited) -> CallError:
    signal = end.code - 128 if end.code > 128 else None
    how = "was killed by signal" if signal else "exited with code"
    message = f"{name}: rank {end.rank} on {end.node} {how} {signal or end.code} without a result"
    kind = RankExited
    if end.out_of_memory:
        kind, message = (
            OutOfMemory,
            f"{message}: the kernel killed it at the memory limit of the pod",
        )
    return kind(message, exit_code=end.code, signal=signal, job=name, rank=end.rank, node=end.node)


def failure(name: str, status: dict[str, Any]) -> CallError:
    """The error of a failed job, from its status."""
    last = status.get("lastFailure") or {}
    reason = str(last.get("reason") or status.get("reason") or "")
    text = str(last.get("message") or status.get("message") or "")
    rank, node = last.get("rank"), str(last.get("node") or "")
    where = f" (rank {rank} on {node})" if rank is not None else f" (on {node})" if node else ""
    message = f"{name}: {reason}: {text}{where}"
    if reason == "Evicted":
        return Evicted(message, job=name, rank=rank, node=node)
    code, signal = last.get("exitCode"), last.get("signal")
    exited = code is not None and code != RAISED and status.get("phase") != "TimedOut"
    if exited or reason == "OOMKilled":
        kind = OutOfMemory if reason == "OOMKilled" else RankExited
        return kind(message, exit_code=code, signal=signal, job=name, rank=rank, node=node)
    return JobFailed(message, reason=reason, job=name)
