"""Phases and reasons of a job as they change, for its user."""

import anyio

from kubectl_torchrun.cluster.job_watch import JobState
from kubectl_torchrun.cluster.slices import Job
from kubectl_torchrun.terminal import Terminal

_TICK_SECONDS = 1.0

NO_CONTROLLER = (
    "no controller has processed the job yet. Check that one is running:"
    " kubectl get deployments -A -l app.kubernetes.io/name=torchrun-controller"
)


class Narrator:
    """Prints each change of a job's status once, and what the job waits for.

    quiet: reasons that are not printed.
    """

    def __init__(
        self, job_watch: JobState, terminal: Terminal, quiet: frozenset[str] = frozenset()
    ) -> None:
        self._job_watch = job_watch
        self._terminal = terminal
        self._quiet = quiet
        self._printed = ("", "", "", 0)
        self._since = anyio.current_time()

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
        headline = (status.phase, status.reason, status.message, status.attempt)
        if headline != self._printed:
            if status.phase and status.reason not in self._quiet:
                text = _transition(job, status.attempt != self._printed[3])
                self._terminal.transition(status.phase, text)
            self._printed, self._since = headline, anyio.current_time()
        if job.has_ended or status.phase == "Running":
            self._terminal.at_rest()
        else:
            brief, text = _waiting_for(job, self._quiet)
            self._terminal.waiting(brief, text, anyio.current_time() - self._since)


def _transition(job: Job, new_attempt: bool) -> str:
    status = job.status
    attempt = f"attempt {status.attempt}: " if new_attempt else ""
    return attempt + ": ".join(part for part in (status.reason, status.message) if part)


def _waiting_for(job: Job, quiet: frozenset[str]) -> tuple[str, str]:
    """What the job waits for, in brief and in full."""
    status = job.status
    if not status.phase:
        return "waiting for the controller", NO_CONTROLLER
    if status.reason in quiet:
        return status.phase, status.phase
    brief = ": ".join(part for part in (status.phase, status.reason) if part)
    return brief, ": ".join(part for part in (brief, status.message) if part)
