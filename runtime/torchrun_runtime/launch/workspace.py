"""The node's own copy of the workspace, from the claim that all workers share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Iterable, Iterator, NamedTuple, Protocol

from .contract import MARKER, SYNC_WAIT_SECONDS
from .errors import LaunchError
from .manifest import Entry, parse
from .output import counted, say, wait_until

# Claims are often on network file systems, where copies wait for round trips.
_THREADS = 16
_SEEN_SECONDS = 30.0
_BATCH = 16  # files; one task for each of 200,000 would need much memory


class WorkspaceCopy(Protocol):
    """The node's own copy of the workspace, wherever its revisions come from.

    revision: that the copy has, 0 before the first.
    """

    revision: int

    def newest_revision(self) -> int:
        """The newest revision that is known without the controller."""

    def accept_unchanged(self, revision: int) -> bool:
        """Take `revision` as the present one if its content is known to be the same."""

    def update(self, revision: int = 0) -> None:
        """Copy what differs in `revision`, or in the newest one for 0. Raises LaunchError."""


class CopyStats(NamedTuple):
    """What was copied. bytes: sum of the files' sizes."""

    files: int
    bytes: int


class SharedWorkspace:
    """A WorkspaceCopy of revisions on a claim."""

    def __init__(self, source: str, target: str) -> None:
        self.revision = 0
        self._source = source
        self._target = target
        self._copied: dict[str, Entry] = {}  # by path; empty while that is not known

    def wait(self, seconds: float) -> None:
        """Wait for the first revision. Raises LaunchError (WorkspaceNotReady)."""
        marker = os.path.join(self._source, MARKER)
        if not wait_until(lambda: os.path.exists(marker), seconds, f"the workspace ({marker})"):
            raise LaunchError(
                "WorkspaceNotReady",
                f"The workspace was not ready after {seconds:.0f} s: {marker} is missing. Read the"
                f" log of the sync pod, or raise {SYNC_WAIT_SECONDS}.",
            )

    def newest_revision(self) -> int:
        """The revision that the marker names; 0 where it cannot be read."""
        try:
            with open(os.path.join(self._source, MARKER), encoding="utf-8") as file:
                return int(json.loads(file.read())["revision"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def accept_unchanged(self, revision: int) -> bool:
        """Never: the content of the new revision is not known yet."""
        del revision
        return False

    def update(self, revision: int = 0) -> None:
        """Copy what differs in the revision, in the newest one for 0.

        The newest one replaces a revision that was removed. Raises LaunchError
        (WorkspaceCopyFailed).
        """
        start = time.monotonic()
        target = revision or self.newest_revision()
        while True:
            tree = os.path.join(self._revision(target), "tree")
            try:
                self._wait_for(target, tree)
                copied = self._copy_revision(target, tree)
                break
            except OSError as error:
                newest = self.newest_revision()
                if newest <= target:
                    raise LaunchError(
                        "WorkspaceCopyFailed",
                        f"Cannot copy the workspace to {self._target}: {error}.",
                    ) from error
                target = newest
        self.revision = target
        say(
            f"workspace: revision {target}, {counted(copied.files)}, {copied.bytes} bytes copied "
            f"to {self._target} ({time.monotonic() - start:.1f} s)"
        )

    def _wait_for(self, revision: int, tree: str) -> None:
        """A network file system may show a revision later than the controller announces it."""

        def is_visible() -> bool:
            return os.path.isdir(tree) or self.newest_revision() > revision

        wait_until(is_visible, _SEEN_SECONDS, f"revision {revision} of the workspace")

    def _copy_revision(self, revision: int, tree: str) -> CopyStats:
        """Copy only what differs where the manifests of the copy and of the revision are known."""
        manifest = self._manifest(revision)
        if not (self._copied and manifest):
            copied = copy_tree(tree, self._target)
        else:
            removed = [path for path in self._copied if path not in manifest]
            changed = [path for path, entry in manifest.items() if self._copied.get(path) != entry]
            self._copied = {}  # not known until all is done
            remove(self._target, removed)
            copied = _copy_changed(tree, self._target, changed)
        self._copied = manifest
        return copied

    def _manifest(self, revision: int) -> dict[str, Entry]:
        """Entries of the revision's manifest by path; empty where it has none."""
        try:
            with open(os.path.join(self._revision(revision), "manifest"), encoding="utf-8") as file:
                return {entry.path: entry for entry in parse(file.read())}
        except OSError:
            return {}

    def _revision(self, number: int) -> str:
        return os.path.join(self._source, "revisions", str(number))


def remove(target: str, paths: Iterable[str]) -> None:
    """Remove files, and directories that are empty then."""
    for path in paths:
        full = os.path.join(target, path)
        with suppress(OSError):
            os.rmdir(full) if os.path.isdir(full) else os.unlink(full)
            while path := os.path.dirname(path):
                os.rmdir(os.path.join(target, path))


def _copy_changed(tree: str, target: str, paths: list[str]) -> CopyStats:
    copied = []
    for path in paths:
        source, full = os.path.join(tree, path), os.path.join(target, path)
        if os.path.isdir(source):
            os.makedirs(full, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(full), exist_ok=True)
        before = modified(full)
        copied.append(_copy_files([_File(source, full, stat.S_IMODE(os.stat(source).st_mode))]))
        show_as_newer(full, before)
    return CopyStats(len(copied), sum(each.bytes for each in copied))


def modified(path: str) -> float:
    """Modification time of the file; 0 if there is none."""
    return os.stat(path).st_mtime if os.path.exists(path) else 0.0


def show_as_newer(path: str, before: float) -> None:
    """Give a replaced file a modification time that differs from the one before.

    Python uses cached bytecode for a source of the same size and second.
    """
    if int(os.stat(path).st_mtime) <= int(before):
        os.utime(path, (before + 1, before + 1))


def copy_tree(source: str, target: str) -> CopyStats:
    """Copy regular files and directories with their permission bits; replaces existing files.

    Raises OSError, also for any other kind of file: a synced workspace has no links.
    """
    with ThreadPoolExecutor(_THREADS, initializer=_block_signals) as pool:
        done = list(pool.map(_copy_files, _batches(_files(source, target))))
    return CopyStats(sum(copied.files for copied in done), sum(copied.bytes for copied in done))


class _File(NamedTuple):
    source: str
    target: str
    mode: int


def _files(source: str, target: str) -> Iterator[_File]:
    """Every file below `source`; makes each directory before its first file."""
    os.makedirs(target, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            path = os.path.join(target, entry.name)
            if stat.S_ISDIR(status.st_mode):
                yield from _files(entry.path, path)
            elif stat.S_ISREG(status.st_mode):
                yield _File(entry.path, path, stat.S_IMODE(status.st_mode))
            else:
                raise OSError(f"{entry.path} is neither a file nor a directory")


def _block_signals() -> None:
    """Leave all signals to the main thread: a thread that ends could lose one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _batches(files: Iterator[_File]) -> Iterator[list[_File]]:
    while batch := list(islice(files, _BATCH)):
        yield batch


def _copy_files(files: list[_File]) -> CopyStats:
    size = 0
    for file in files:
        shutil.copyfile(file.source, file.target)
        os.chmod(file.target, file.mode | stat.S_IWUSR)
        size += os.path.getsize(file.target)
    return CopyStats(len(files), size)
