"""Bring an archive to a job's sync pod, whichever pod that is at the moment."""

from collections.abc import AsyncIterator
from io import BufferedRandom
from typing import NamedTuple

import anyio
import msgspec

from kubectl_torchrun.api import Api, ApiError, Unreachable
from kubectl_torchrun.errors import RunProblem, UploadProblem
from kubectl_torchrun.mirror import Mirror, end_of
from kubectl_torchrun.pack import Archive
from kubectl_torchrun.retry import PATIENT, Backoff
from kubectl_torchrun.terminal import Bar, Terminal
from kubectl_torchrun.upload import Answer, Ask, Done, Refused, Send, Upload, Wait
from torchrun_api import names
from torchrun_api.core import Pod

PATH = "/v1/upload"
_BLOCK = 256 << 10


class Verdict(msgspec.Struct, frozen=True):
    """The termination message of a sync pod."""

    reason: str = ""
    message: str = ""
    permanent: bool = False


class Arrived(NamedTuple):
    """No pod is needed any more: the workspace is there."""


async def deliver(
    api: Api,
    mirror: Mirror,
    terminal: Terminal,
    archive: Archive,
    *,
    pod_wait: float,
    backoff: Backoff = PATIENT,
) -> None:
    """Upload until the pod has made the workspace of it.

    Raises UploadProblem: no sync pod for `pod_wait` seconds, the archive refused, no progress for
    `backoff.give_up` seconds. RunProblem: the job has come to nothing meanwhile. ApiError where
    the API server forbids it.
    """
    first = await wait_for_pod(mirror, archive.sha256, pod_wait)
    if isinstance(first, Arrived):
        return
    upload = Upload(archive.size, archive.sha256, anyio.current_time(), backoff)
    with terminal.bar("Uploading", archive.size) as bar:
        while True:
            step = upload.next_step(anyio.current_time())
            match step:
                case Done():
                    return
                case Refused(reason, message):
                    raise UploadProblem(f"The workspace was not taken ({reason}): {message}")
                case Wait(seconds):
                    await anyio.sleep(seconds)
                case Ask() | Send():
                    since = anyio.current_time()
                    pod = await wait_for_pod(mirror, archive.sha256, pod_wait)
                    if isinstance(pod, Arrived):
                        return
                    upload.waited(anyio.current_time() - since)
                    await _carry_out(step, pod, api, upload, archive, bar)
                    bar.reached(upload.offset)


async def wait_for_pod(mirror: Mirror, sha256: str, seconds: float) -> str | Arrived:
    """The name of the pod that takes this archive now."""
    with anyio.move_on_after(seconds):
        while True:
            found = find_pod(mirror, sha256)
            if found is not None:
                return found
            await mirror.changed(seconds)
    why = ""
    if mirror.job is not None and mirror.job.status.reason:
        why = f" ({mirror.job.status.reason}: {mirror.job.status.message})"
    raise UploadProblem(f"No sync pod took the upload within {seconds:.0f} s{why}.")


def find_pod(mirror: Mirror, sha256: str) -> str | Arrived | None:
    """The pod that takes this archive, or None so far. Raises as `deliver`."""
    job = mirror.job
    if not mirror.seen:
        return None
    if job is None:
        raise RunProblem(f"The job {mirror.name} was deleted.")
    status = job.status
    wanted = job.metadata.annotations.get(names.WORKSPACE_SHA256, "")
    if job.workspace_ready and wanted in ("", sha256):
        return Arrived()
    if job.ended:
        raise RunProblem(f"The job is {status.phase} ({status.reason}): {status.message}")
    if status.reason == "InvalidSpec":
        raise RunProblem(f"The job cannot run as it is: {status.message}")
    pods = [pod for pod in mirror.of_component(names.SYNC) if _takes(pod, sha256)]
    if not pods:
        return None
    latest = max(pods, key=_number)
    match latest.status.phase:
        case "Running" if _is_ready(latest):
            return latest.metadata.name
        case "Succeeded" if latest.metadata.annotations.workspace_sha256 == sha256:
            return Arrived()
        case "Failed":
            verdict = _verdict(latest)
            if verdict.permanent:
                raise UploadProblem(
                    f"The workspace was not taken ({verdict.reason}): {verdict.message}"
                )
    return None


async def _carry_out(
    step: Ask | Send, pod: str, api: Api, upload: Upload, archive: Archive, bar: Bar
) -> None:
    try:
        if isinstance(step, Ask):
            status, body = await api.ask_pod(pod, "GET", PATH)
        else:
            headers = {
                "Content-Range": f"bytes {step.start}-{step.stop - 1}/{archive.size}",
                "Content-Length": str(step.stop - step.start),
                "Content-Type": "application/octet-stream",
                "X-Torchrun-Sha256": archive.sha256,
            }
            content = _blocks(archive.file, step, bar)
            status, body = await api.ask_pod(pod, "PUT", PATH, headers=headers, content=content)
    except Unreachable as error:
        upload.lost(str(error), anyio.current_time())
        return
    except ApiError as error:
        if not (error.passes or error.status == 404):  # 404: the pod has gone, another will come
            raise
        upload.lost(error.message, anyio.current_time(), error.retry_after)
        return
    upload.answered(status, _answer(body), anyio.current_time())


async def _blocks(file: BufferedRandom, step: Send, bar: Bar) -> AsyncIterator[bytes]:
    position = step.start
    while position < step.stop:
        file.seek(position)
        block = file.read(min(_BLOCK, step.stop - position))
        yield block
        position += len(block)
        bar.reached(position)


def _answer(body: bytes) -> Answer:
    try:
        return msgspec.json.decode(body, type=Answer)
    except msgspec.DecodeError:
        return Answer(message=body.decode(errors="replace").strip()[:500])


def _takes(pod: Pod, sha256: str) -> bool:
    named = pod.metadata.annotations.workspace_sha256
    return pod.metadata.deletion_timestamp is None and named in ("", sha256)


def _number(pod: Pod) -> int:
    suffix = pod.metadata.name.rpartition("-")[2]
    return int(suffix) if suffix.isdecimal() else 0


def _is_ready(pod: Pod) -> bool:
    return any(status.ready for status in pod.status.container_statuses)


def _verdict(pod: Pod) -> Verdict:
    end = end_of(pod, names.SYNC_CONTAINER)
    try:
        return msgspec.json.decode(end.message if end else "", type=Verdict)
    except msgspec.DecodeError:
        return Verdict()
