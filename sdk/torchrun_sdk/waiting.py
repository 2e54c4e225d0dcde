"""Waiting for a call: what its job, its pods and their connections say, until a verdict."""

from __future__ import annotations

import queue
import time
from contextlib import ExitStack
from typing import Any, Callable

from torchrun_sdk.cancel import Cancellation, Cancelled
from torchrun_sdk.connections import Bring, Connections, Heard
from torchrun_sdk.errors import CallError, ProtocolError
from torchrun_sdk.kubectl import Kubectl, Watch
from torchrun_sdk.log import CallLog, JobLog
from torchrun_sdk.manifest import ENDED, workers_of
from torchrun_sdk.spec import Result
from torchrun_sdk.verdict import Verdict, Wait

Line = Callable[[str], None]
Note = Callable[[str], None]
# For pods that stay to answer a client that has another call for them.
_ANSWER_SECONDS = 20.0
_LAST_LINES = 2.0  # for the end of what the ranks print


class UnavailableError(Exception):
    """The pods that stayed cannot take this call: they are busy, leave or are gone."""


class Waiting:
    """One call of a job, to its end.

    call: its id, "" for the newest of the job. bring: for pods that stay; nodes: how many there
    are. first: whether the job was made for it, so that it need not be brought to the first gang.
    cancellation: wakes it.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        verdict: Verdict,
        call: str,
        note: Note,
        *,
        nodes: int = 0,
        bring: Bring | None = None,
        first: bool = True,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._kubectl = kubectl
        self._cancellation = cancellation or Cancellation()
        self._verdict = verdict
        self._call = call
        self._note = note
        self._nodes = nodes
        self._bring = bring
        self._heard: queue.Queue[Heard] = queue.Queue()
        self._pods = Connections(kubectl, call, self._heard, bring)
        self._began = time.monotonic()
        self._here: set[str] = set()
        self._ready: set[tuple[int, str]] = set()
        self._brought = first
        self._log: CallLog | None = None
        self._times: dict[str, float] = {}

    def run(self, line: Line | None) -> list[Result]:
        """The results of all ranks, sorted.

        Raises CallError, ClusterError, UnavailableError, Cancelled.
        """
        with ExitStack() as until:
            until.callback(self._pods.close)
            wake = self._cancellation.waking(lambda: self._heard.put(("cancelled", None)))
            until.enter_context(wake)
            for watch in self._watches():
                until.callback(watch.close)
            log = None
            if line is not None and self._verdict.stays:
                self._log = CallLog(line, several=self._nodes != 1)
            elif line is not None:
                log = JobLog(self._kubectl, self._verdict.name, line)
                until.callback(log.close)
            while True:
                self._check_brought()
                decided = self._verdict.decide(time.monotonic())
                if isinstance(decided, Wait):
                    self._take(decided.seconds)
                    continue
                self._last_words(failed=isinstance(decided, CallError))
                if log is not None:
                    log.wait()
                if isinstance(decided, CallError):
                    raise decided
                return decided

    def _last_words(self, *, failed: bool) -> None:
        """What the ranks of pods that stay have still to say, and to hear."""
        self._time("decided")
        if failed and self._bring is not None:
            self._pods.end()
        until = time.monotonic() + _LAST_LINES
        while (log := self._log) is not None and not failed and time.monotonic() < until:
            if log.ended(self._verdict.attempt) >= self._verdict.world:
                break
            self._take(0.2)
        self._time("log")

    def _watches(self) -> list[Watch]:
        name, heard = self._verdict.name, self._heard
        return [
            Watch(
                self._kubectl,
                ["torchrunjob", name],
                lambda kind, job: heard.put(("deleted" if kind == "DELETED" else "job", job)),
            ),
            Watch(
                self._kubectl,
                ["pods", "--selector", workers_of(name)],
                lambda kind, pod: heard.put(("gone" if kind == "DELETED" else "pod", pod)),
            ),
        ]

    def _check_brought(self) -> None:
        """A call for pods of an earlier one begins in all of them, or not at all."""
        if self._brought:
            return
        over = self._verdict.phase in ENDED or self._verdict.is_gone
        late = time.monotonic() - self._began > _ANSWER_SECONDS
        if over or (late and len(self._here) < self._nodes):
            raise UnavailableError(f"{len(self._here)} of {self._nodes} pods have answered")

    def _take(self, seconds: float) -> None:
        try:
            what, it = self._heard.get(timeout=min(seconds, 60.0 if self._brought else 1.0))
        except queue.Empty:
            return
        now = time.monotonic()
        if what == "job":
            self._job(it, now)
        elif what == "deleted":
            self._verdict.deleted(now)
        elif what == "frame":
            attempt, frame = it
            self._time(type(frame).__name__)
            self._verdict.frame(attempt, frame, now)
        elif what == "lines":
            if self._log is not None:
                self._log.take(*it)
        elif what in ("pod", "gone"):
            self._time("pods seen")
            if it:
                self._pods.pod(it, gone=what == "gone")
        else:
            self._answer(what, it)

    def _job(self, job: dict[str, Any], now: float) -> None:
        before = self._verdict.phase
        self._verdict.job(job.get("status") or {}, now)
        if self._brought and self._verdict.phase != before:
            self._note(f"{self._verdict.name}: {self._verdict.phase}")

    def _answer(self, what: str, it: Any) -> None:
        """Of a pod that the call is brought to, and what ends it here."""
        self._time(what)
        if what == "cancelled":
            if self._bring is not None:
                self._pods.end()
            raise Cancelled
        if what == "failed":
            raise it
        if what == "unreadable":
            name = self._verdict.name
            raise ProtocolError(
                f"{name}: pod {it[0]} sends what this version of torchrun-sdk cannot read: {it[1]}."
                f" The job is left as it is; come back with the version that made it: kt results"
                f" {name}",
                job=name,
            )
        if what == "refused":
            raise UnavailableError(f"the pods are {it}")
        if what == "here":
            self._here.add(it[1])
            return
        self._ready.add(it)
        attempt = it[0]
        if sum(number == attempt for number, _ in self._ready) == self._nodes:
            self._brought = True
            self._pods.go(attempt)

    def _time(self, what: str) -> None:
        self._times[what] = time.monotonic() - self._began

    @property
    def told(self) -> str:
        """When each kind of thing was heard of last, in seconds, for who looks for time."""
        return ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self._times.items())
