"""Upload edits to a job that runs: its pods restart the command with the new files."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec

from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import JOBS, JobSlice
from kubectl_torchrun.errors import DETACHED, RunProblem, UploadProblem, UsageProblem
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.text import files_of, human
from kubectl_torchrun.upload import consent, pack, upload_token
from kubectl_torchrun.upload.cache import LastUpload, UploadCache, Workspace
from kubectl_torchrun.upload.deliver import deliver
from torchrun_api import names
from torchrun_api.json import JsonObject

_WORKERS_SECONDS = 60.0
# The pause between two scans: at least this, and four times the duration of a scan.
_SCAN_SECONDS = 0.3
_SCAN_SHARE = 4


class _PodsBehind(UploadProblem):
    """The workspace has the upload, but not all pods do."""


class DirectoryReload:
    """One job and one directory.

    pod_wait: seconds to wait for the pod that receives the upload. token: the upload token.
    sync_arguments: of a `sync` that uploads the same files, for messages.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: str,
        directory: Path,
        cache: UploadCache,
        terminal: Display,
        pod_wait: float,
        token: str,
        overlay: Path | None,
        sync_arguments: tuple[str, ...],
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._directory = directory
        self._cache = cache
        self._terminal = terminal
        self._pod_wait = pod_wait
        self._token = token
        self._overlay = overlay
        self._sync_arguments = sync_arguments

    def once(self) -> int:
        """Upload the directory once; the exit code. Raises Problem."""
        workspace = self._scan(asks=True)
        send = partial(self._send, workspace=workspace)
        try:
            return self._run(send, f"Stopped. {self._next_step()}")
        except _PodsBehind:
            raise
        except UploadProblem as problem:
            raise UploadProblem(f"{problem}\n{self._next_step()}") from problem

    def _next_step(self) -> str:
        sync = self._cluster.command(f"torchrun sync {self._job}", *self._sync_arguments)
        return (
            f"Job {self._job} continues with its current files. To upload the directory:\n  {sync}"
        )

    def watch(self) -> int:
        """Upload each edit, in development mode, until the job ends or Ctrl-C."""
        return self._run(self._watch, f"Job {self._job} continues with its current files.")

    def _run(self, work: Callable[[Api, JobWatch], Awaitable[None]], interrupted: str) -> int:
        """Run `work` beside a watch of the job; the exit code. interrupted: the note at Ctrl-C."""

        async def run(api: Api) -> int:
            job_watch = JobWatch(api, self._job, reloads=True)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(job_watch.run)
                await work(api, job_watch)
                tasks.cancel_scope.cancel()
            return 0

        try:
            return self._cluster.run(run)
        except KeyboardInterrupt:
            self._terminal.interrupted()
            self._terminal.note(interrupted)
            return DETACHED

    async def _watch(self, api: Api, job_watch: JobWatch) -> None:
        token: JsonObject = {names.UPLOAD_TOKEN_SHA256: upload_token.token_sha256(self._token)}
        # One patch: a pod waits for edits only if the job has an upload token.
        development: JsonObject = {
            "metadata": {"annotations": token},
            "spec": {"development": True},
        }
        await api.merge(JOBS, self._job, msgspec.json.encode(development))
        self._terminal.note(f"Watching {self._directory.resolve()}. Press Ctrl-C to stop.")
        uploaded = previous = last_note = ""
        failures = 0
        while not ((job := _last_job(job_watch)) and job.has_ended):
            started, note, delay = time.monotonic(), "", 0.0
            try:
                workspace = await anyio.to_thread.run_sync(self._scan, _check_cancelled)
                sha256 = workspace.manifest.sha256
                # Upload only after two equal scans: an editor may still be writing.
                if sha256 != uploaded and sha256 == previous:
                    await self._send(api, job_watch, workspace)
                    uploaded, failures = sha256, 0
                previous = sha256
            except UsageProblem as problem:
                note = str(problem)
            except UploadProblem as problem:
                note, uploaded = str(problem), previous
            except RunProblem as problem:
                if job_watch.job is None or not job_watch.job.has_ended:
                    raise
                note = str(problem)
            except (Unreachable, RequestError) as error:  # the watch of the job limits the time
                if isinstance(error, RequestError) and not error.retriable:
                    raise
                failures += 1
                note, delay = f"{error}. The upload is repeated.", api.backoff.delay(failures)
            if note not in ("", last_note):
                self._terminal.note(note)
            last_note = note
            scans = _SCAN_SHARE * (time.monotonic() - started)
            await anyio.sleep(delay or max(_SCAN_SECONDS, scans))

    def _scan(
        self, advance: Callable[[int], None] = lambda _: None, *, asks: bool = False
    ) -> Workspace:
        files = consent.scan(self._directory, self._overlay, asks=asks)
        pack.check(files)
        return self._cache.digest(files, advance)

    async def _send(self, api: Api, job_watch: JobWatch, workspace: Workspace) -> None:
        started = time.monotonic()
        sha256 = workspace.manifest.sha256
        job = await api.get(JOBS, self._job)
        expected = job.metadata.annotations.get(names.WORKSPACE_SHA256)
        if expected == sha256 and _has_workspace(job) and self._has_arrived(sha256):
            self._terminal.note(f"Job {self._job} already has this content.")
            return
        annotations = {
            names.WORKSPACE_SHA256: sha256,
            names.UPLOAD_TOKEN_SHA256: upload_token.token_sha256(self._token),
        }
        await api.annotate(JOBS, self._job, annotations)
        done = await deliver(
            api, job_watch, self._terminal, workspace, pod_wait=self._pod_wait, token=self._token
        )
        if done.revision:
            revision = str(done.revision)
            await api.annotate(JOBS, self._job, {names.WORKSPACE_REVISION: revision})
        # Only now: a recorded upload of the same content is not repeated.
        self._cache.record(LastUpload(self._job, workspace.manifest))
        await self._wait_for_workers(job_watch, done.revision)
        self._terminal.note(
            f"Revision {done.revision}: {files_of(done.files)}, {human(done.sent_bytes)} uploaded;"
            f" the pods got it in {time.monotonic() - started:.1f} s"
        )

    def _has_arrived(self, sha256: str) -> bool:
        """Whether the upload cache has this upload. The annotation alone does not prove it: an
        earlier command may have been killed between annotation and upload."""
        last = self._cache.last_upload()
        return last is not None and (last.job, last.manifest.sha256) == (self._job, sha256)

    async def _wait_for_workers(self, job_watch: JobWatch, revision: int) -> None:
        """Wait until the status shows that all pods have the revision.

        Raises RunProblem: the job has ended or was deleted. _PodsBehind: not within
        _WORKERS_SECONDS.
        """
        with anyio.move_on_after(_WORKERS_SECONDS):
            while not (job := _last_job(job_watch)) or job.status.workspace_revision < revision:
                if job and job.has_ended:
                    raise RunProblem(f"The job is {job.status.phase}.")
                await job_watch.next_change(_WORKERS_SECONDS)
            return
        raise _PodsBehind(
            f"Revision {revision} is in the workspace, but not all pods got it within"
            f" {_WORKERS_SECONDS:.0f} s. If a pod has ended, the next attempt runs the revision.\n"
            f"See: {self._cluster.command(f'torchrun status {self._job}')}"
        )


def _last_job(job_watch: JobWatch) -> JobSlice | None:
    """The last state of the job; None before it is read. Raises RunProblem if it was deleted."""
    if job_watch.has_read and job_watch.job is None:
        raise RunProblem(f"Job {job_watch.name} was deleted.")
    return job_watch.job


def _has_workspace(job: JobSlice) -> bool:
    """Whether the job has its workspace, and the status does not request another upload."""
    failed = job.up_to_date is not None and job.up_to_date.status == "False"
    return job.workspace_ready and not failed


def _check_cancelled(_: int) -> None:
    """Called between two files, so that Ctrl-C ends the thread."""
    anyio.from_thread.check_cancelled()
