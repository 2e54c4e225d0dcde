"""Phases and reasons of a job as they change, for its user."""

from typing import NamedTuple

import anyio

from kubectl_torchrun.cluster.job_watch import JobState
from kubectl_torchrun.cluster.phases import NEW
from kubectl_torchrun.terminal import QUIET_SECONDS, Display

_TICK_SECONDS = 1.0

NO_CONTROLLER = (
    "no controller has processed the job yet. Check that one is running:"
    " kubectl get deployments -A -l app.kubernetes.io/name=torchrun-controller"
)


class _Headline(NamedTuple):
    """What a line says about a status."""

    phase: str
    attempt: int
    restarts: int  # in the same pods
    reason: str
    message: str


class Narrator:
    """Prints a line for each phase and restart of a job, and what the job waits for.

    Reasons follow each other fast, and messages count pods. Within a phase, only another reason
    that lasts gets a line. quiet: reasons that are not printed.
    """

    def __init__(
        self, job_watch: JobState, terminal: Display, quiet: frozenset[str] = frozenset()
    ) -> None:
        self._job_watch = job_watch
        self._terminal = terminal
        self._quiet = quiet
        self._seen: _Headline | None = None
        self._since = anyio.current_time()  # of what was seen
        self._printed: _Headline | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self.catch_up()
            await self._job_watch.next_change(_TICK_SECONDS)

    def catch_up(self) -> None:
        """Print what is new."""
        job = self._job_watch.job
        if job is None:
            return
        status = job.status
        restarts = status.restarts_in_place
        seen = _Headline(status.phase, status.attempt, restarts, status.reason, status.message)
        if seen != self._seen:
            self._seen, self._since = seen, anyio.current_time()
        seconds = anyio.current_time() - self._since
        is_waiting = not (job.has_ended or status.phase == "Running")
        is_quiet = status.reason in self._quiet
        if not is_quiet and self._is_news(seen, seconds):
            before = self._printed.attempt if self._printed else 0
            attempt = f"attempt {seen.attempt}: " if seen.attempt != before else ""
            self._terminal.transition(seen.phase or NEW, attempt + _text(seen))
            self._printed = seen
        if is_waiting:
            text = "" if is_quiet else _text(seen)
            self._terminal.waiting(seen.phase or NEW, text, seconds)
        else:
            self._terminal.at_rest()

    def _is_news(self, seen: _Headline, seconds: float) -> bool:
        """Whether to print this line. seconds: since it was first seen."""
        printed = self._printed
        if seen.phase and (printed is None or printed[:3] != seen[:3]):
            return True
        has_lasted = seconds >= QUIET_SECONDS
        return has_lasted and (printed is None or printed.reason != seen.reason)


def _text(line: _Headline) -> str:
    if not line.phase:
        return NO_CONTROLLER
    return ": ".join(part for part in (line.reason, line.message) if part)
