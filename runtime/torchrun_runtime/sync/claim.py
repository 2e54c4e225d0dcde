"""The layout of the workspace PVC, and the steps that publish a revision atomically.

    revisions/<n>/tree/      the workspace of revision n; its files never change
    revisions/<n>/manifest   the manifest of that tree
    .sync_success            marker, names the complete revision to run
    state/                   the only directory that workers may write to, as any user
    env/                     Python environments of setup pods, which run as the user of workers
    tree.new-<pod>/          the next revision while it is written; discarded by the next pod
    .incoming/               unfinished upload; outlives the pod, except work/

A new revision is written next to the others and shares unchanged files with them. It exists once
the marker, which is replaced with a rename, names it. If the pod is killed between two steps, the
next pod finds the marker or repeats the work.
"""

import ctypes
import json
import os
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchrun_api.contents import MARKER, Manifest, parse
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.modes import give
from torchrun_runtime.sync.report import now

NEW = "tree.new"


@dataclass(frozen=True)
class Marker:
    """The published revision. bytes: sum of its files' sizes; time: RFC 3339.

    sha256: of the upload. commit, source: content and digest of the source of a fetched workspace.
    """

    sha256: str
    files: int
    bytes: int
    time: str
    revision: int
    commit: str = ""
    source: str = ""


class Claim:
    """One PVC. Only this pod writes to it, except for a pod that still runs on a lost node.

    after: a revision that already exists, even if the PVC does not show it.
    """

    def __init__(self, directory: Path, after: int = 0) -> None:
        self.directory = directory
        self.incoming = directory / ".incoming"
        self.work = self.incoming / "work"
        self.new = directory / f"{NEW}-{socket.gethostname()}"
        self._after = after
        self.shared = (directory / "state", directory / "env")

    def prepare(self) -> None:
        """Create the directory of the upload, and remove old revisions.

        Raises SyncError if the PVC is missing or cannot be written.
        """
        try:
            self.incoming.mkdir(exist_ok=True)
            probe = self.incoming / "probe"
            probe.touch()
            probe.unlink()
            self._discard_old()
        except OSError as error:
            message = (
                f"Cannot write to the workspace PVC at {self.directory}: {error.strerror}. It must"
                f" be writable for UID {os.getuid()} (fsGroup)."
            )
            raise SyncError("WorkspaceNotWritable", message, permanent=False) from error

    def marker(self) -> Marker | None:
        """The marker of the published revision, or None."""
        try:
            return Marker(**json.loads((self.directory / MARKER).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def tree(self, revision: int) -> Path:
        """The directory of a revision's files."""
        return self._revision(revision) / "tree"

    def manifest(self) -> Manifest:
        """The manifest of the published revision; empty if unknown."""
        marker = self.marker()
        if marker is None:
            return Manifest(())
        try:
            return parse((self._revision(marker.revision) / "manifest").read_text())
        except (OSError, ValueError):
            return Manifest(())

    def discard_unfinished(self) -> None:
        """Remove the files of an interrupted step."""
        self.discard_tree()
        if self.work.exists():
            shutil.rmtree(self.work)

    def discard_tree(self) -> None:
        """Remove unfinished trees."""
        for tree in self.directory.glob(f"{NEW}*"):
            shutil.rmtree(tree)

    def _discard_old(self) -> None:
        """Remove all revisions but the newest two.

        A launcher that still copies the older of them may finish. A slower launcher finds its
        files removed, and starts again with the newest revision.
        """
        marker = self.marker()
        newest = marker.revision if marker else 0
        for number in self._revisions():
            if not newest - 1 <= number <= newest:
                shutil.rmtree(self._revision(number))

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
        number = max(before.revision if before else 0, self._after) + 1
        identity = sha256 or manifest.sha256
        marker = Marker(identity, manifest.files, manifest.size, now(), number, commit, source)
        self.make_state()
        directory = self._revision(marker.revision)
        directory.mkdir(parents=True)
        (directory / "manifest").write_text(manifest.text)
        self.new.rename(directory / "tree")
        _sync_filesystem(directory)
        self._mark(marker)
        return marker

    def confirm(self, marker: Marker, *, commit: str, source: str) -> Marker:
        """Record that the newest revision is the current content of the source. Raises OSError."""
        confirmed = replace(marker, commit=commit, source=source)
        self._mark(confirmed)
        return confirmed

    def _mark(self, marker: Marker) -> None:
        write_durably(self.directory / MARKER, json.dumps(asdict(marker)).encode())

    def _revision(self, number: int) -> Path:
        return self.directory / "revisions" / str(number)

    def _revisions(self) -> list[int]:
        try:
            names = os.listdir(self.directory / "revisions")
        except FileNotFoundError:
            return []
        return [int(name) for name in names if name.isdecimal()]

    def discard_upload(self) -> None:
        """Delete the upload."""
        shutil.rmtree(self.incoming, ignore_errors=True)


def unavailable(directory: Path, error: OSError) -> SyncError:
    """Return the error for a failed file system. Another pod may succeed."""
    message = f"The workspace PVC at {directory} failed: {error}."
    return SyncError("WorkspaceNotWritable", message, permanent=False)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file atomically, also in case of a crash."""
    temporary = path.with_name(path.name + ".tmp")
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
