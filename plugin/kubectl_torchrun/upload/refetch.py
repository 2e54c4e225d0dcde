"""Asks a job whose workspace comes from git or s3 to fetch it again, while it runs."""

import time
from datetime import UTC, datetime

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.slices import JOBS, Job
from kubectl_torchrun.errors import RunProblem, UploadProblem
from kubectl_torchrun.terminal import Terminal
from torchrun_api import names
from torchrun_api.meta import Condition


async def request(api: Api, name: str) -> None:
    """Request a fetch of the newest code. Raises ApiError."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    await api.annotate(JOBS, name, {names.SYNC_REQUESTED: now})


async def refetch(api: Api, job: Job, terminal: Terminal, seconds: float) -> int:
    """Have it fetched, and wait for what comes of it; the exit code.

    Raises UploadProblem: it cannot be fetched. RunProblem: the job has ended meanwhile, or nothing
    has come of it within `seconds`.
    """
    name, before = job.metadata.name, job.status.workspace_revision
    job_watch = JobWatch(api, name, reloads=True)
    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job_watch.run)
        await request(api, name)
        try:
            with anyio.fail_after(seconds):
                changed = await _outcome(job_watch, before)
        except TimeoutError:
            raise RunProblem(
                f"Nothing new is there after {seconds:.0f} s. It goes on; see what it waits for:"
                f" kubectl torchrun why {name}"
            ) from None
        tasks.cancel_scope.cancel()
    status = changed.status
    what = f"revision {status.workspace_revision} (commit {status.workspace_commit})"
    if status.workspace_revision == before:
        terminal.note(f"Nothing has changed: {name} runs {what} already.")
    else:
        passed = time.monotonic() - started
        terminal.note(f"{name} runs {what}, workers told in {passed:.1f} s.")
    return 0


async def _outcome(job_watch: JobWatch, before: int) -> Job:
    """The job once its workers have the new revision, or once there is none."""
    # Once the condition is Unknown, the controller acts on this request.
    asked = False
    while True:
        job = job_watch.job
        if job_watch.seen and job is None:
            raise RunProblem(f"The job {job_watch.name} was deleted.")
        if job is not None:
            if job.ended:
                raise RunProblem(f"The job is {job.status.phase} meanwhile.")
            if job.status.workspace_revision > before:
                return job
            behind = _behind(job)
            if asked and behind is None:
                return job
            if asked and behind is not None and behind.status == "False":
                raise UploadProblem(f"It cannot be fetched ({behind.reason}): {behind.message}")
            asked = asked or (behind is not None and behind.status == "Unknown")
        await job_watch.next_change(60)


def _behind(job: Job) -> Condition | None:
    conditions = (c for c in job.status.conditions if c.type == names.UP_TO_DATE)
    return next(conditions, None)
