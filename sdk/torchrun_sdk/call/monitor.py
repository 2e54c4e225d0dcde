"""Follows one call to its outcome: its job, its pods and the connections into them."""

from __future__ import annotations

import queue
import time
from contextlib import ExitStack
from typing import Any, Callable

from torchrun_sdk.call.connections import CallDelivery, Connections, MonitorEvent
from torchrun_sdk.call.log import CallLog, JobLog
from torchrun_sdk.call.state import CallState, Wait
from torchrun_sdk.cluster.cancel import Cancellation, Cancelled
from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.cluster.manifest import TERMINAL_PHASES, workers_of
from torchrun_sdk.cluster.watch import Trouble, Watch
from torchrun_sdk.errors import CallError, ClusterError, ProtocolError
from torchrun_sdk.spec import Result

Line = Callable[[str], None]
Note = Callable[[str], None]
# Time limit for responses of warm pods to a new call.
_ANSWER_SECONDS = 20.0
_LAST_LINES = 2.0  # for the last output of the ranks


class PodsUnavailableError(Exception):
    """The warm pods cannot run this call: they are busy, terminating or deleted."""


class CallMonitor:
    """One call of a job, to its end.

    call: its id, "" for the newest of the job. delivery: for warm pods; nodes: their number.
    first: the job was created for this call, so that the first gang already has it.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        state: CallState,
        call: str,
        note: Note,
        *,
        nodes: int = 0,
        delivery: CallDelivery | None = None,
        first: bool = True,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._kubectl = kubectl
        self._cancellation = cancellation or Cancellation()
        self._state = state
        self._call = call
        self._note = note
        self._nodes = nodes
        self._delivery = delivery
        self._events: queue.Queue[MonitorEvent] = queue.Queue()
        self._pods = Connections(kubectl, state.name, call, self._events, delivery)
        self._start = time.monotonic()
        self._pods_answered: set[str] = set()
        self._pods_ready: set[tuple[int, str]] = set()
        self._delivered = first
        self._log: CallLog | None = None
        self._times: dict[str, float] = {}

    @property
    def is_delivered(self) -> bool:
        """Whether the pods have the call: it runs with or without this client."""
        return self._delivered

    def run(self, line: Line | None) -> list[Result]:
        """The results of all ranks, sorted.

        Raises CallError, ClusterError, UnavailableError, Cancelled.
        """
        with ExitStack() as until:
            until.callback(self._pods.close)
            wake = self._cancellation.waking(lambda: self._events.put(("cancelled", None)))
            until.enter_context(wake)
            for watch in self._watches():
                until.callback(watch.close)
            log = None
            if line is not None and self._state.stays:
                self._log = CallLog(line, several=self._nodes != 1)
            elif line is not None:
                log = JobLog(self._kubectl, self._state.name, line, self._note)
                until.callback(log.close)
            while True:
                self._check_delivered()
                decided = self._state.decide(time.monotonic())
                if isinstance(decided, Wait):
                    self._take(decided.seconds)
                    continue
                self._drain_logs(failed=isinstance(decided, CallError))
                if log is not None:
                    log.wait()
                if isinstance(decided, CallError):
                    raise decided
                return decided

    def _drain_logs(self, *, failed: bool) -> None:
        """Read the last output of a call in warm pods; end ranks that still run after a failure."""
        self._time("decided")
        if failed and self._delivery is not None:
            self._pods.end()
        until = time.monotonic() + _LAST_LINES
        while (log := self._log) is not None and not failed and time.monotonic() < until:
            if log.complete_count(self._state.attempt) >= self._state.world:
                break
            self._take(0.2)
        self._time("log")

    def _watches(self) -> list[Watch]:
        name, events = self._state.name, self._events
        return [
            Watch(
                self._kubectl,
                ["torchrunjob", name],
                lambda kind, job: events.put(("deleted" if kind == "DELETED" else "job", job)),
                lambda why: events.put(("trouble", why)),
            ),
            Watch(
                self._kubectl,
                ["pods", "--selector", workers_of(name)],
                lambda kind, pod: events.put(("gone" if kind == "DELETED" else "pod", pod)),
                lambda why: events.put(("trouble", why)),
            ),
        ]

    def _check_delivered(self) -> None:
        """Raise UnavailableError if pods are missing: a call starts in all warm pods or none."""
        if self._delivered:
            return
        is_over = self._state.phase in TERMINAL_PHASES or self._state.is_deleted
        late = time.monotonic() - self._start > _ANSWER_SECONDS
        if is_over or (late and len(self._pods_answered) < self._nodes):
            raise PodsUnavailableError(
                f"only {len(self._pods_answered)} of {self._nodes} pods responded"
            )

    def _take(self, seconds: float) -> None:
        try:
            what, value = self._events.get(timeout=min(seconds, 60.0 if self._delivered else 1.0))
        except queue.Empty:
            return
        now = time.monotonic()
        if what == "job":
            self._job(value, now)
        elif what == "deleted":
            self._state.job_deleted(now)
        elif what == "frame":
            attempt, frame = value
            self._time(type(frame).__name__)
            self._state.add_frame(attempt, frame, now)
        elif what == "lines":
            if self._log is not None:
                self._log.take(*value)
        elif what in ("pod", "gone"):
            self._time("pods seen")
            if value:
                self._pods.pod(value, is_deleted=what == "gone")
        else:
            self._answer(what, value)

    def _job(self, job: dict[str, Any], now: float) -> None:
        before = self._state.phase
        self._state.job_changed(job.get("status") or {}, now)
        if self._delivered and self._state.phase != before:
            self._note(f"{self._state.name}: {self._state.phase}")

    def _answer(self, what: str, value: Any) -> None:
        """Handle the response of a warm pod, or an exception of the client."""
        self._time(what)
        if what == "cancelled":
            if self._delivery is not None:
                self._pods.end()
            raise Cancelled
        if what == "failed":
            raise value
        if what == "trouble":
            self._trouble(value)
            return
        if what == "unreadable":
            name, (pod, why) = self._state.name, value
            raise ProtocolError(
                f"Job {name}: this version of torchrun-sdk cannot decode a message of pod {pod}:"
                f" {why}. The job was not changed. Use the version that created it: kt results"
                f" {name}",
                job=name,
            )
        if what == "refused":
            raise PodsUnavailableError(f"the pods are {value}")
        if what == "here":
            self._pods_answered.add(value[1])
            return
        self._pods_ready.add(value)
        attempt = value[0]
        if sum(number == attempt for number, _ in self._pods_ready) == self._nodes:
            self._delivered = True
            self._pods.go(attempt)

    def _trouble(self, trouble: Trouble) -> None:
        """Note what fails for long; raises ClusterError if the cluster refuses it."""
        text = f"{self._state.name}: {trouble.text}"
        if not trouble.is_refused:
            self._note(text)
            return
        raise ClusterError(
            f"{text}\nThe job was not changed. With the permission, read its results: kt results"
            f" {self._state.name}"
        )

    def _time(self, what: str) -> None:
        self._times[what] = time.monotonic() - self._start

    @property
    def times(self) -> str:
        """Seconds from the start to the last event of each kind, for measurements."""
        return ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self._times.items())
