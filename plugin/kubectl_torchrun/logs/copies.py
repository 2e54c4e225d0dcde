"""Logs of deleted pods: the copies that launchers write to the job's workspace PVC.

A copy is `state/logs/<attempt>/node-<index>.log` of the workspace PVC; its older part, if it has
grown large, is `node-<index>.log.1`. Running pods mount `state` at /torchrun-state. Lines have the
CRI format: time, stream, F, text. Older launchers wrote only the text.
"""

import re
import secrets
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import IO, NamedTuple

from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.kubectl import LastLines, bounded_lines, find_kubectl
from kubectl_torchrun.cluster.pods import has_started
from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import CLAIMS, PODS, JobSlice
from kubectl_torchrun.errors import ClusterProblem, Problem
from kubectl_torchrun.logs import reader_pod
from kubectl_torchrun.logs.streams import View
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.text import human
from torchrun_api import names
from torchrun_api.kinds.core import Pod

STATE = "/torchrun-state"
_SPOOL_BYTES = 4 << 20
# Processes of the job may change the files. A launcher writes at most 64 MiB for a node.
_COPY_BYTES = 128 << 20
_LISTING_BYTES = 16 << 20
_MARK = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) std(?:out|err) F ")
_NUMBER = re.compile(r"\d{1,9}")
_NAME = re.compile(r"node-(\d{1,9})\.log")
# The attempts in one line, then the files of the selected attempt.
_LIST = 'cd "$0/logs" 2>/dev/null && echo * && cd "$1" 2>/dev/null && ls -1; true'
_SHOW = 'cat "$0.1" "$0" 2>/dev/null; true'
_TAIL = 'cat "$0.1" "$0" 2>/dev/null | tail -n "$1"; true'


class Place(NamedTuple):
    """A container in which the state directory is mounted at `root`."""

    cluster: Cluster
    pod: str
    container: str
    root: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs a command in the container."""
        where = [*self.cluster.pinned.flags(), self.pod, "-c", self.container]
        return [find_kubectl(), "exec", *where, "--", *words]

    @contextmanager
    def output(self, *words: str) -> Iterator[IO[bytes]]:
        """The output of a command in the container, to read from. Raises CommandFailed at its end.

        If it was not read to its end, the command is stopped.
        """
        with subprocess.Popen(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            stderr = LastLines(process.stderr)
            try:
                yield process.stdout
                if not process.stdout.read(1) and process.wait():
                    raise CommandFailed(process.returncode, stderr.after_end())
            finally:
                process.terminate()

    def listing(self, attempt: int) -> tuple[list[int], list[int]]:
        """The attempts with copies, and the nodes of this attempt. Raises ClusterProblem."""
        with self.output("sh", "-c", _LIST, self.root, str(attempt)) as output:
            text = output.read(_LISTING_BYTES).decode(errors="replace")
        listed, _, files = text.partition("\n")
        attempts = [int(word) for word in listed.split() if _NUMBER.fullmatch(word)]
        nodes = [int(match[1]) for name in files.split() if (match := _NAME.fullmatch(name))]
        return sorted(attempts), sorted(nodes)

    def lines(self, attempt: int, node: int, tail: int | None) -> Iterator[bytes]:
        """A node's copy without times. tail: only the last lines. Raises ClusterProblem."""
        for line in self.stamped_lines(attempt, node, tail):
            yield split(line)[1]

    def download(self, attempt: int, node: int, view: View, until: ExitStack) -> "LogCopy":
        """Download the part of a node's copy that the view can show. Raises ClusterProblem."""
        spool = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115  # `until` closes it
        until.enter_context(spool)
        for line in self.stamped_lines(attempt, node, view.lines_to_read):
            spool.write(line + b"\n")
        return LogCopy(spool, view)

    def stamped_lines(self, attempt: int, node: int, tail: int | None) -> Iterator[bytes]:
        """The lines of the copy with their times. Raises ClusterProblem."""
        path = f"{self.root}/logs/{attempt}/node-{node}.log"
        words = ["sh", "-c", _SHOW, path] if tail is None else ["sh", "-c", _TAIL, path, str(tail)]
        size = 0
        with self.output(*words) as output:
            for line in bounded_lines(output):
                size += len(line)
                if size > _COPY_BYTES:
                    yield f"(the copy is longer than {human(_COPY_BYTES)}; it ends here)".encode()
                    break
                yield line


class CommandFailed(ClusterProblem):
    """A command in a container has failed, or could not be started. code: of kubectl exec."""

    def __init__(self, code: int, stderr: Sequence[str]) -> None:
        super().__init__(f"kubectl exec failed: {stderr[-1] if stderr else 'no error message'}")
        self.code = code


def split(line: bytes) -> tuple[bytes, bytes]:
    """Time and text of a line of a copy; the time is empty in copies of older launchers."""
    mark = _MARK.match(line)
    return (mark[1], line[mark.end() :]) if mark else (b"", line)


class LogCopy:
    """A downloaded copy. `timed`: whether its lines have times."""

    def __init__(self, spool: IO[bytes], view: View) -> None:
        self.stamp = b""
        self._spool = spool
        self._since = view.since
        spool.seek(0)
        self.timed = any(split(line)[0] for line in (spool.readline(), spool.readline()))

    async def read(self, *, follow: bool, has_ended: bool) -> AsyncGenerator[bytes, None]:
        """The lines, as `Cursor.read` returns them, without an incomplete first line."""
        del follow, has_ended
        for stamp, text in self.stamped_lines():
            self.stamp = stamp
            yield text

    def stamped_lines(self) -> Iterator[tuple[bytes, bytes]]:
        """Time and text of each line, without an incomplete first one."""
        oldest = last = b""
        if self._since is not None:
            moment = datetime.now(UTC) - timedelta(seconds=self._since)
            oldest = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
        self._spool.seek(0)
        for line in self._spool:
            stamp, text = split(line.removesuffix(b"\n"))
            last = stamp or last
            if not self.timed or (last and last >= oldest):
                yield last, text


@contextmanager
def place(
    cluster: Cluster, job: JobSlice, workers: Sequence[Pod], terminal: Display
) -> Iterator[Place]:
    """A container that can read the copies: of a running pod of the job, else of a temporary pod.

    Raises Problem if neither is possible.
    """
    name = job.metadata.name
    why = cluster.run(lambda api: _why_no_copies(api, cluster, job))
    if why:
        raise ClusterProblem(f"Job {name} has no state directory with copies of logs: {why}")
    for pod in workers:
        if pod.status.phase == "Running" and has_started(pod, names.TRAINER_CONTAINER):
            yield Place(cluster, pod.metadata.name, names.TRAINER_CONTAINER, STATE)
            return
    # A name of its own, because the reader of another command ends with that command.
    reader = f"{name}-log-reader-{secrets.token_hex(3)}"
    terminal.note(f"No pod of job {name} is running. Reading its PVC with pod {reader}.")
    try:
        cluster.run(lambda api: reader_pod.start(api, job, reader))
        yield Place(cluster, reader, reader_pod.CONTAINER, f"{reader_pod.CLAIM}/state")
    finally:
        _delete_reader(cluster, reader, terminal)


async def _why_no_copies(api: Api, cluster: Cluster, job: JobSlice) -> str:
    """Why no pod of the job can have written copies, and what to do; "" if one can.

    A user who may not read PVCs may still create a pod that mounts one.
    """
    workspace = job.spec.volumes.workspace
    in_new_job = "To keep copies in a new job, set"
    if workspace is None or not workspace.enabled or workspace.source in ("none", "existing"):
        return f"it has no workspace PVC of its own. {in_new_job} its source to zip, git or s3."
    if workspace.delivery == "direct" or job.is_delivered_directly:
        return (
            f"its workspace is delivered directly. {in_new_job} volumes.workspace.delivery to"
            " shared."
        )
    name = names.workspace_claim(job.metadata.name)
    try:
        claim = await api.get(CLAIMS, name)
    except RequestError as error:
        if error.status == 404:
            return f"PVC {name} does not exist. Only the logs of existing pods can be read."
        return ""
    if claim.status.phase == "Pending":
        return f"PVC {name} is not bound. See: {cluster.command(f'describe pvc {name}')}"
    if claim.spec.access_modes == ("ReadOnlyMany",):
        return (
            f"PVC {name} is ReadOnlyMany. {in_new_job} volumes.workspace.accessMode to"
            " ReadWriteMany."
        )
    return ""


def _delete_reader(cluster: Cluster, reader: str, terminal: Display) -> None:
    async def remove(api: Api) -> None:
        try:
            await api.delete(PODS, reader, grace=1)
        except RequestError as error:
            if error.status != 404:
                raise

    try:
        cluster.run(remove)
    except (Problem, KeyboardInterrupt):
        terminal.note(
            f"Pod {reader} may still exist. It stops after"
            f" {reader_pod.LIFETIME_SECONDS // 60} minutes. To delete it:\n"
            f"  {cluster.command(f'delete pod {reader}')}"
        )
        raise
