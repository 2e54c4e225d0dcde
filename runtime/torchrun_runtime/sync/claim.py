"""The layout of the workspace PVC, and the steps that publish a revision atomically.

    revisions/<n>/tree/      the workspace of revision n; its files never change
    revisions/<n>/manifest   the manifest of that tree
    .sync_success            marker, names the complete revision to run
    state/                   the only directory that workers may write to, as any user
    env/                     Python environments of setup pods, which run as the user of workers
    tree.new-<pod>/          what one pod writes or removes; discarded by the next pod
    .incoming-<job>/         unfinished upload; outlives the pod

A new revision is written next to the others and shares unchanged files with them. It exists once
the marker, which is replaced with a rename, names it. If the pod is killed between two steps, the
next pod finds the marker or repeats the work.

A pod on a lost machine may still run. So each pod writes to its own directory, and moves there
what it removes, also the directories of other pods. A pod that still writes then fails at its next
step, and nobody takes a part of a tree for the whole.
"""

import ctypes
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from torchrun_api.contract.contents import MARKER, Manifest, parse
from torchrun_runtime.sync.errors import FULL, SyncError, workspace_full
from torchrun_runtime.sync.report import log, now
from torchrun_runtime.sync.tree import give

NEW = "tree.new"
INCOMING = ".incoming"


@dataclass(frozen=True)
class Marker:
    """The published revision. bytes: sum of its files' sizes; time: RFC 3339.

    sha256: of the upload. commit, source: content and digest of the source of a fetched workspace.
    job: UID; "" if an earlier release has published it.
    """

    sha256: str
    files: int
    bytes: int
    time: str
    revision: int
    commit: str = ""
    source: str = ""
    job: str = ""


_FIELDS = {field.name for field in fields(Marker)}


class Claim:
    """One PVC. Only this pod writes to it, except for a pod that still runs on a lost machine.

    last_revision: one that already existed, even if the PVC does not show it. job: UID of the job,
    as a retained PVC may have the revisions of another one; "" if unknown.
    """

    def __init__(self, directory: Path, last_revision: int = 0, job: str = "") -> None:
        self.directory = directory
        self.incoming = directory / (f"{INCOMING}-{job}" if job else INCOMING)
        # A restarted container has the same host name.
        self._own = directory / f"{NEW}-{socket.gethostname()}-{secrets.token_hex(4)}"
        self.new = self._own / "tree"
        self.work = self._own / "work"
        self._unpublished = self._own / "revision"
        self._discarded = 0
        self._last_revision = last_revision
        self._job = job
        self.shared = (directory / "state", directory / "env")

    def prepare(self) -> None:
        """Create the directories of this pod and of the upload, and remove what is old.

        A pod that still runs cannot publish any more.

        Raises SyncError if the PVC is missing, full, or cannot be written.
        """
        try:
            try:
                self._prepare()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._make_room()
                self._prepare()
        except OSError as error:
            if error.errno in FULL:
                raise workspace_full(error.strerror or "no space is left") from error
            message = (
                f"Cannot write to the workspace PVC at {self.directory}: {error.strerror}. It must"
                f" be writable for UID {os.getuid()} (fsGroup)."
            )
            raise SyncError("WorkspaceNotWritable", message, permanent=False) from error

    def _prepare(self) -> None:
        self._own.mkdir(exist_ok=True)
        self._discard(*self._unfinished())
        self._discard_old()
        self.incoming.mkdir(exist_ok=True)
        probe = self.incoming / "probe"
        probe.touch()
        probe.unlink()

    def _make_room(self) -> None:
        """Remove all that is unfinished, also the upload, which clients send again.

        The PVC may have no room for the directory of this pod, to which they are moved otherwise.
        """
        log("no space is left, removing what is unfinished", "warning")
        for number, directory in enumerate((*self._unfinished(), self.incoming)):
            _remove(directory, self._own.with_name(f"{self._own.name}-removed-{number}"))

    def _unfinished(self) -> set[Path]:
        """What other pods have left, and uploads of other jobs."""
        found = {path for name in (NEW, INCOMING) for path in self.directory.glob(f"{name}*")}
        return found - {self._own, self.incoming}

    def marker(self) -> Marker | None:
        """The marker of the published revision; None if there is none, or no valid one.

        A later release may have added fields. Raises OSError.
        """
        try:
            content = dict(json.loads((self.directory / MARKER).read_bytes()))
            return Marker(**{name: content[name] for name in _FIELDS & content.keys()})
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def is_of_job(self, marker: Marker, *, has_run: bool) -> bool:
        """Whether the revision is of this job. Another one is only a base for it.

        has_run: whether this job has had a workspace before, so a marker without a job is its own.
        """
        return not self._job or marker.job == self._job or (not marker.job and has_run)

    def tree(self, revision: int) -> Path:
        """The directory of a revision's files."""
        return self._revision(revision) / "tree"

    def manifest(self, marker: Marker) -> Manifest:
        """The manifest of the revision of a marker; empty if it is missing. Raises OSError."""
        try:
            return parse((self._revision(marker.revision) / "manifest").read_text())
        except (FileNotFoundError, ValueError):
            return Manifest(())

    def is_complete(self, marker: Marker, manifest: Manifest) -> bool:
        """Whether the revision of a marker has all its files: launchers refuse to run a part of it.

        A pod of an earlier release on a lost machine may have removed some. manifest: of the
        revision; it may be lost as well. Raises OSError.
        """
        sizes = list(_sizes(self.tree(marker.revision)))
        expected = (marker.files, marker.bytes)
        return (len(sizes), sum(sizes)) == (manifest.files, manifest.size) == expected

    def base(self) -> tuple[Path, Manifest] | None:
        """The newest tree and its manifest, for another PVC; None if they cannot be read."""
        with suppress(OSError):
            if marker := self.marker():
                return self.tree(marker.revision), self.manifest(marker)
        return None

    def discard_unfinished(self) -> None:
        """Remove the unfinished tree of this pod, and its temporary files."""
        self._discard(self.new, self.work, self._unpublished)

    def discard_tree(self) -> None:
        """Remove the unfinished tree of this pod."""
        self._discard(self.new)

    def discard_upload(self) -> None:
        """Remove the upload."""
        self._discard(self.incoming)

    def _discard_old(self) -> None:
        """Remove all revisions but the newest two.

        A launcher that still copies the older of them may finish. A slower launcher finds its
        files removed, and starts again with the newest revision.
        """
        marker = self.marker()
        if marker is not None:
            old = (number for number in self._revisions() if number < marker.revision - 1)
            self._discard(*map(self._revision, old))

    def _discard(self, *directories: Path) -> None:
        """Remove those that exist. The next pod tries again with what cannot be removed yet."""
        for directory in directories:
            self._discarded += 1
            _remove(directory, self._own / f"removed-{self._discarded}")

    def make_state(self) -> None:
        """Create the directories of other pods, writable by any user like /tmp. Raises OSError.

        The kubelet would create a missing directory for root only, which this pod cannot change.
        """
        for directory in self.shared:
            directory.mkdir(exist_ok=True)
            give(directory, 0o1777)

    def publish(
        self, manifest: Manifest, sha256: str = "", *, commit: str = "", source: str = ""
    ) -> Marker:
        """Publish the new tree as the newest revision, which workers run.

        manifest: of the tree. sha256: of the upload, by default the manifest's. Raises OSError.
        """
        before = self.marker()
        number = max(before.revision if before else 0, self._last_revision, *self._revisions()) + 1
        identity = sha256 or manifest.sha256
        size = manifest.size
        marker = Marker(identity, manifest.files, size, now(), number, commit, source, self._job)
        self.make_state()
        self._unpublished.mkdir()
        (self._unpublished / "manifest").write_text(manifest.text)
        self.new.rename(self._unpublished / "tree")
        _sync_filesystem(self._unpublished)
        directory = self._revision(number)
        directory.parent.mkdir(exist_ok=True)
        self._unpublished.rename(directory)
        _sync_directory(directory.parent)
        self._mark(marker)
        return marker

    def confirm(self, marker: Marker, *, commit: str, source: str) -> Marker:
        """Record that the newest revision is the current content of the source. Raises OSError."""
        confirmed = replace(marker, commit=commit, source=source, job=self._job)
        self._mark(confirmed)
        return confirmed

    def _mark(self, marker: Marker) -> None:
        content = json.dumps(asdict(marker)).encode()
        write_durably(self.directory / MARKER, content, self._own / "marker")

    def _revision(self, number: int) -> Path:
        return self.directory / "revisions" / str(number)

    def _revisions(self) -> list[int]:
        try:
            names = os.listdir(self.directory / "revisions")
        except FileNotFoundError:
            return []
        return [int(name) for name in names if name.isdecimal()]

    def finish(self) -> None:
        """Delete the upload and the directory of this pod."""
        for directory in (self.incoming, self._own):
            shutil.rmtree(directory, ignore_errors=True)


def _remove(directory: Path, moved: Path) -> None:
    """Move a directory if it exists, so that nobody writes to it any more, then remove it.

    NFS keeps files that another program of the node has open, with their directories.
    """
    try:
        directory.rename(moved)
    except FileNotFoundError:
        return
    except OSError as error:
        log("not removed yet", "warning", path=str(directory), cause=str(error))
        return
    shutil.rmtree(moved, ignore_errors=True)
    if moved.exists():
        log("not removed yet", "warning", path=str(moved))


def _sizes(tree: Path) -> Iterator[int]:
    """The sizes of all files of a tree. Raises OSError."""
    for directory, _, names in os.walk(tree):
        for name in names:
            with suppress(FileNotFoundError):
                yield os.lstat(os.path.join(directory, name)).st_size


def unavailable(directory: Path, error: OSError) -> SyncError:
    """Return the error for a full or failed file system. Another pod may succeed."""
    if error.errno in FULL:
        return workspace_full(error.strerror or "no space is left")
    message = f"The workspace PVC at {directory} failed: {error}."
    return SyncError("WorkspaceNotWritable", message, permanent=False)


def write_durably(path: Path, content: bytes, temporary: Path | None = None) -> None:
    """Replace a file atomically, also in case of a crash. temporary: on the same volume."""
    temporary = temporary or path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    give(temporary, 0o644)
    temporary.replace(path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_filesystem(directory: Path) -> None:
    """Flush one file system, because fsync of each of 200,000 files takes minutes.

    os.sync() would wait for every file system of the node, also for one that hangs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if libc.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)
