"""Upload a workspace to a job's current sync pod."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from io import BufferedRandom
from typing import NamedTuple

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec

from kubectl_torchrun.cluster.backoff import PATIENT, Retries
from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable, describe_body
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.pods import end_of
from kubectl_torchrun.errors import RunProblem, UploadProblem
from kubectl_torchrun.terminal import Bar, Display
from kubectl_torchrun.upload import pack
from kubectl_torchrun.upload.cache import Workspace
from kubectl_torchrun.upload.pack import Archive
from kubectl_torchrun.upload.protocol import (
    BuildArchive,
    GetState,
    PodReply,
    PutManifest,
    PutRange,
    Rejected,
    Sleep,
    Stored,
    Upload,
)
from kubectl_torchrun.upload.upload_token import token_sha256
from torchrun_api import names
from torchrun_api.contract import contents
from torchrun_api.kinds.core import Pod

PATH = "/v1/upload"
MANIFEST_PATH = "/v1/manifest"
_BLOCK = 256 << 10


class SyncEnd(msgspec.Struct, frozen=True):
    """The termination message of a sync pod."""

    reason: str = ""
    message: str = ""
    permanent: bool = False
    sha256: str = ""
    revision: int = 0


class Arrived(NamedTuple):
    """The pod already has the workspace, as this revision (0: unknown)."""

    revision: int = 0


class Delivered(NamedTuple):
    """The result. files, sent_bytes: the number of uploaded files and bytes."""

    revision: int
    files: int = 0
    sent_bytes: int = 0


async def deliver(
    api: Api,
    job_watch: JobWatch,
    terminal: Display,
    workspace: Workspace,
    *,
    pod_wait: float,
    token: str,
    backoff: Retries = PATIENT,
) -> Delivered:
    """Upload missing files, until the pod has the workspace. token: the upload token of the job.

    Raises UploadProblem: no sync pod for `pod_wait` seconds, a rejected archive, no room for the
    archive on this machine, or no progress for `backoff.give_up` seconds. UsageProblem: a file
    changed or cannot be read. RunProblem: the job has ended or was deleted. ApiError: the API
    server forbids the upload.
    """
    try:
        with tempfile.TemporaryFile() as file:
            delivery = _Delivery(
                api, job_watch, terminal, workspace, file, pod_wait, token, backoff
            )
            return await delivery.run()
    except BrokenPipeError:  # of stderr
        raise
    except OSError as error:
        where = f" in {tempfile.tempdir}" if tempfile.tempdir else ""
        raise UploadProblem(
            f"Cannot store the archive in a temporary file{where}: {error.strerror}. Free space"
            " there, or set TMPDIR to another directory."
        ) from error


class _Delivery:
    def __init__(
        self,
        api: Api,
        job_watch: JobWatch,
        terminal: Display,
        workspace: Workspace,
        file: BufferedRandom,
        pod_wait: float,
        token: str,
        backoff: Retries,
    ) -> None:
        self._api = api
        self._job_watch = job_watch
        self._terminal = terminal
        self._workspace = workspace
        self._file = file
        self._pod_wait = pod_wait
        self._token = token
        base = workspace.previous.manifest.sha256 if workspace.previous else ""
        now = anyio.current_time()
        self._upload = Upload(workspace.manifest.sha256, now, base, backoff)
        self._files = 0
        self._sent_bytes = 0

    async def run(self) -> Delivered:
        with ExitStack() as bars:
            bar = Bar("", 0, None)
            while True:
                step = self._upload.next_step(anyio.current_time())
                match step:
                    case Stored(revision):
                        return self._delivered(revision)
                    case Rejected(reason, message):
                        raise UploadProblem(f"The workspace was rejected ({reason}): {message}")
                    case Sleep(seconds):
                        await anyio.sleep(seconds)
                    case BuildArchive(entries):
                        bars.close()
                        # In a thread, which Ctrl-C can end between two blocks of a file.
                        archive = await anyio.to_thread.run_sync(self._pack, entries)
                        self._upload.on_archive(archive.sha256, archive.size, anyio.current_time())
                        bar = bars.enter_context(self._terminal.bar("Uploading", archive.size))
                    case GetState() | PutManifest() | PutRange():
                        since = anyio.current_time()
                        sha256 = self._workspace.manifest.sha256
                        pod = await wait_for_pod(
                            self._job_watch, sha256, self._pod_wait, token_sha256(self._token)
                        )
                        if isinstance(pod, Arrived):
                            return self._delivered(pod.revision)
                        self._upload.add_idle_time(anyio.current_time() - since)
                        await self._carry_out(step, pod, bar)
                        bar.reached(self._upload.offset)

    def _delivered(self, revision: int) -> Delivered:
        return Delivered(revision, self._files, self._sent_bytes)

    def _pack(self, entries: tuple[int, ...]) -> Archive:
        self._file.seek(0)
        self._file.truncate()
        known = self._workspace.manifest.entries
        if any(index >= len(known) or known[index].mode == "dir" for index in entries):
            raise UploadProblem("The pod requests files that the workspace does not have.")
        total = sum(known[index].size for index in entries)
        with self._terminal.bar("Packing", total) as bar:
            done = 0

            def advance(size: int) -> None:
                nonlocal done
                anyio.from_thread.check_cancelled()
                done += size
                bar.reached(done)

            archive = pack.write(self._workspace, entries, self._file, advance)
        self._files += archive.files
        return archive

    async def _carry_out(self, step: GetState | PutManifest | PutRange, pod: str, bar: Bar) -> None:
        upload = self._upload
        try:
            status, body = await self._request(step, pod, bar)
        except Unreachable as error:
            upload.on_failure(str(error), anyio.current_time())
            return
        except RequestError as error:
            if not (error.retriable or error.status == 404):  # 404: the pod is being replaced
                raise
            upload.on_failure(error.message, anyio.current_time(), error.retry_after)
            return
        upload.on_response(status, _response(body), anyio.current_time())

    async def _request(
        self, step: GetState | PutManifest | PutRange, pod: str, bar: Bar
    ) -> tuple[int, bytes]:
        authentication = {
            "X-Torchrun-Workspace": self._workspace.manifest.sha256,
            "X-Torchrun-Upload-Token": self._token,
        }
        match step:
            case GetState():
                return await self._api.ask_pod(pod, "GET", PATH, headers=authentication)
            case PutManifest(base):
                before = self._workspace.previous
                differs_from = before.manifest if before and base else None
                data = contents.pack(self._workspace.manifest, differs_from)
                self._sent_bytes += len(data)
                headers = {**authentication, "Content-Length": str(len(data))}
                return await self._api.ask_pod(
                    pod, "PUT", MANIFEST_PATH, headers=headers, content=data
                )
            case PutRange(start, stop):
                self._sent_bytes += stop - start
                headers = {
                    "Content-Range": f"bytes {start}-{stop - 1}/{self._upload.size}",
                    "Content-Length": str(stop - start),
                    "Content-Type": "application/octet-stream",
                    "X-Torchrun-Sha256": self._upload.sha256,
                    **authentication,
                }
                return await self._api.ask_pod(
                    pod, "PUT", PATH, headers=headers,
                    content=lambda: _blocks(self._file, step, bar),
                )  # fmt: skip


async def wait_for_pod(
    job_watch: JobWatch, sha256: str, seconds: float, token: str = ""
) -> str | Arrived:
    """The name of the pod for this workspace. token: the SHA-256 of the upload token."""
    with anyio.move_on_after(seconds):
        while True:
            pod = find_pod(job_watch, sha256, token)
            if pod is not None:
                return pod
            await job_watch.next_change(seconds)
    why = ""
    if job_watch.job is not None and job_watch.job.status.reason:
        why = f" ({job_watch.job.status.reason}: {job_watch.job.status.message})"
    raise UploadProblem(f"No sync pod was ready within {seconds:.0f} s{why}.")


def find_pod(job_watch: JobWatch, sha256: str, token: str = "") -> str | Arrived | None:
    """The pod for this workspace, or None if there is none yet. Raises as `deliver`."""
    job = job_watch.job
    if not job_watch.has_read:
        return None
    if job is None:
        raise RunProblem(f"Job {job_watch.name} was deleted.")
    status = job.status
    expected = job.metadata.annotations.get(names.WORKSPACE_SHA256, "")
    if job.workspace_ready and expected in ("", sha256) and not job_watch.reloads:
        return Arrived()
    if job.has_ended:
        raise RunProblem(f"The job is {status.phase} ({status.reason}): {status.message}")
    if status.reason == "InvalidSpec":
        raise RunProblem(f"The spec of the job is invalid: {status.message}")
    pods = job_watch.of_component(names.SYNC)
    if job_watch.reloads and pods:  # only the newest pod serves the current revision
        pods = [max(pods, key=_pod_number)]
    pods = [pod for pod in pods if _accepts_workspace(pod, sha256, token)]
    if not pods:
        return None
    latest = max(pods, key=_pod_number)
    match latest.status.phase:
        case "Running" if _is_ready(latest):
            return latest.metadata.name
        case "Succeeded" if (sync := _sync_message(latest)).sha256 == sha256:
            return Arrived(sync.revision)
        case "Failed":
            sync = _sync_message(latest)
            if sync.permanent:
                raise UploadProblem(f"The workspace was rejected ({sync.reason}): {sync.message}")
    return None


async def _blocks(file: BufferedRandom, step: PutRange, bar: Bar) -> AsyncIterator[bytes]:
    position = step.start
    while position < step.stop:
        file.seek(position)
        block = file.read(min(_BLOCK, step.stop - position))
        yield block
        position += len(block)
        bar.reached(position)


def _response(body: bytes) -> PodReply:
    try:
        return msgspec.json.decode(body, type=PodReply)
    except msgspec.DecodeError:
        return PodReply(message=describe_body(body))


def _accepts_workspace(pod: Pod, sha256: str, token: str) -> bool:
    """Whether the pod accepts this workspace, by its digest or by the upload token."""
    expected = pod.metadata.annotations
    by_token = expected.workspace_sha256 == "" and expected.upload_token_sha256 == token
    by_digest = expected.workspace_sha256 == sha256
    return pod.metadata.deletion_timestamp is None and (by_digest or by_token)


def _pod_number(pod: Pod) -> int:
    suffix = pod.metadata.name.rpartition("-")[2]
    return int(suffix) if suffix.isdecimal() else 0


def _is_ready(pod: Pod) -> bool:
    return any(status.ready for status in pod.status.container_statuses)


def _sync_message(pod: Pod) -> SyncEnd:
    end = end_of(pod, names.SYNC_CONTAINER)
    try:
        return msgspec.json.decode(end.message if end else "", type=SyncEnd)
    except msgspec.DecodeError:
        return SyncEnd()
