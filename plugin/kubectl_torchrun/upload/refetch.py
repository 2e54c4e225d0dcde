"""Request a new fetch of a workspace from git or s3, for a job that runs."""

import time
from datetime import UTC, datetime

import anyio

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.slices import JOBS, JobSlice
from kubectl_torchrun.errors import RunProblem, UploadProblem
from kubectl_torchrun.terminal import Display
from torchrun_api import names


async def request(api: Api, name: str) -> None:
    """Request a fetch of the newest code. Raises ApiError."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    await api.annotate(JOBS, name, {names.SYNC_REQUESTED: now})


async def refetch(api: Api, job: JobSlice, terminal: Display, seconds: float, why: str) -> int:
    """Request a fetch and wait for its result; the exit code. why: a command for the user.

    Raises UploadProblem: the fetch failed, or had no result within `seconds`. RunProblem: the job
    has ended.
    """
    name, before = job.metadata.name, job.status.workspace_revision
    job_watch = JobWatch(api, name, reloads=True)
    start = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job_watch.run)
        await request(api, name)
        try:
            with anyio.fail_after(seconds):
                changed = await _wait_for_result(job_watch, before)
        except TimeoutError:
            raise UploadProblem(
                f"The fetch did not finish within {seconds:.0f} s and continues. See: {why}"
            ) from None
        tasks.cancel_scope.cancel()
    status = changed.status
    what = f"revision {status.workspace_revision} (commit {status.workspace_commit})"
    if status.workspace_revision == before:
        terminal.note(f"Job {name} already runs {what}.")
    else:
        elapsed = time.monotonic() - start
        terminal.note(f"Job {name} runs {what}. Its pods got it in {elapsed:.1f} s.")
    return 0


async def _wait_for_result(job_watch: JobWatch, before: int) -> JobSlice:
    """The job after its pods have the new revision, or after a fetch without changes."""
    # The condition is Unknown while the controller acts on this request.
    is_acknowledged = False
    while True:
        job = job_watch.job
        if job_watch.has_read and job is None:
            raise RunProblem(f"Job {job_watch.name} was deleted.")
        if job is not None:
            if job.has_ended:
                raise RunProblem(f"The job is {job.status.phase}. It ended before the fetch.")
            if job.status.workspace_revision > before:
                return job
            condition = job.up_to_date
            if is_acknowledged and condition is None:
                return job
            if is_acknowledged and condition is not None and condition.status == "False":
                raise UploadProblem(f"The fetch failed ({condition.reason}): {condition.message}")
            if condition is not None and condition.status == "Unknown":
                is_acknowledged = True
        await job_watch.next_change(60)
