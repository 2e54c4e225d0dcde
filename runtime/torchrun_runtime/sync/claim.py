"""The claim's layout, and the steps that make a workspace appear on it all at once.

    tree/            the workspace
    tree.new/        extraction under way; worthless after a restart
    tree.old/        the workspace before, while it is being replaced
    state/           the one directory that workers may write to, whoever their images run as
    .sync_success    marker, written last: with it, tree/ is whole
    .incoming/       upload under way; outlives the pod

Killed between any two steps, the next pod either finds the marker or does the work again.
"""

import ctypes
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.report import now

MARKER = ".sync_success"


@dataclass(frozen=True)
class Marker:
    """What the workspace was made of. bytes: sum of its files' sizes; time: RFC 3339."""

    sha256: str
    files: int
    bytes: int
    time: str


class Claim:
    """One claim, mounted writable by this pod alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.incoming = directory / ".incoming"
        self.tree = directory / "tree"
        self.new = directory / "tree.new"
        self.old = directory / "tree.old"
        self.state = directory / "state"

    def prepare(self) -> None:
        """Make the upload's directory.

        Raises SyncError where the claim is missing or cannot be written.
        """
        try:
            self.incoming.mkdir(exist_ok=True)
            probe = self.incoming / "probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            message = (
                f"cannot write to the workspace claim at {self.directory}: {error.strerror}; "
                f"it must be mounted writable for uid {os.getuid()} (fsGroup)"
            )
            raise SyncError("WorkspaceNotWritable", message, permanent=False) from error

    def marker(self) -> Marker | None:
        """The marker of a finished workspace, or None."""
        try:
            return Marker(**json.loads((self.directory / MARKER).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def discard_unfinished(self) -> None:
        """Remove what an interrupted extraction left."""
        for leftover in (self.new, self.old):
            if leftover.exists():
                shutil.rmtree(leftover)

    def make_state(self) -> None:
        """Make the workers' directory, for any user as /tmp is. Raises OSError.

        Where it is missing the kubelet makes it for root alone, and that one cannot be mended here.
        """
        self.state.mkdir(exist_ok=True)
        with suppress(PermissionError):
            self.state.chmod(0o1777)

    def publish(self, sha256: str, files: int, size: int) -> Marker:
        """Put tree.new in the place of tree, then write the marker. Raises OSError."""
        marker = Marker(sha256, files, size, now())
        _sync_filesystem(self.new)
        (self.directory / MARKER).unlink(missing_ok=True)
        if self.tree.exists():
            self.tree.rename(self.old)
        self.new.rename(self.tree)
        self.make_state()
        _sync_directory(self.directory)
        write_durably(self.directory / MARKER, json.dumps(asdict(marker)).encode())
        self.discard_unfinished()
        return marker

    def discard_upload(self) -> None:
        """Give the upload's space back."""
        shutil.rmtree(self.incoming, ignore_errors=True)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or the next boot, finds the old or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(0o644)
    temporary.replace(path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_filesystem(directory: Path) -> None:
    """Flush one file system: fsync of each of 200,000 files takes minutes.

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
