"""The node's copy of the workspace: its manifest, and copies from the PVC that all workers share.

A manifest has the text format of torchrun_api.contract.contents.
"""

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
from typing import Iterable, Iterator, Mapping, NamedTuple, Protocol

from .cause import LaunchError
from .contract import MARKER, SYNC_WAIT_SECONDS
from .output import counted, say, wait_until

# PVCs are often on network file systems, where copies wait for round trips.
_THREADS = 16
_SEEN_SECONDS = 30.0
_UNSURE = -1  # size of an entry that an incomplete copy may have, or may have removed
_BATCH = 16  # files of one task; 200,000 tasks would need much memory


class ManifestEntry(NamedTuple):
    """A file, or an empty directory (no sha256, mode 0). size in bytes."""

    path: str
    sha256: str
    size: int
    mode: int

    @property
    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.mode != 0


def parse(text: str) -> list[ManifestEntry]:
    """The entries in the order of the lines. Raises ValueError at an invalid line."""
    return [_entry(line) for line in text.split("\n") if line]


def _entry(line: str) -> ManifestEntry:
    sha256, size, mode, path = line.split(" ", 3)
    if mode == "dir":
        return ManifestEntry(path, "", 0, 0)
    return ManifestEntry(path, sha256, int(size), int(mode, 8))


class WorkspaceCopy(Protocol):
    """The node's copy of the workspace, from any source.

    revision: of the copy, 0 before the first.
    """

    revision: int

    def newest_revision(self) -> int:
        """The newest revision that is known without the controller."""

    def accept_unchanged(self, revision: int, served: str = "") -> bool:
        """Set the current revision to `revision` if its content is known to be the same.

        served: the address of the serve pod in the order of the leader.
        """

    def update(self, revision: int = 0, served: str = "") -> None:
        """Copy the differences to `revision`, or to the newest one for 0. Raises LaunchError."""


class UncopiedWorkspace:
    """A WorkspaceCopy of a directory that the command uses itself: nothing is copied."""

    def __init__(self) -> None:
        self.revision = 0

    def newest_revision(self) -> int:
        """The current one: only an annotation announces another."""
        return self.revision

    def accept_unchanged(self, revision: int, served: str = "") -> bool:
        """Does nothing, because each revision is an edit."""
        del revision, served
        return False

    def update(self, revision: int = 0, served: str = "") -> None:
        """Set the revision."""
        del served
        self.revision = max(self.revision, revision)


class CopyStats(NamedTuple):
    """Counts of copied files. bytes: sum of their sizes."""

    files: int
    bytes: int


class SharedWorkspace:
    """A WorkspaceCopy of revisions on a PVC."""

    def __init__(self, source: str, target: str) -> None:
        self.revision = 0
        self._source = source
        self._target = target
        self._copied: dict[str, ManifestEntry] = {}  # by path

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
        """The revision in the marker; 0 if it cannot be read."""
        try:
            with open(os.path.join(self._source, MARKER), encoding="utf-8") as file:
                return int(json.loads(file.read())["revision"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def accept_unchanged(self, revision: int, served: str = "") -> bool:
        """Does nothing, because the content of the new revision is not known yet."""
        del revision, served
        return False

    def update(self, revision: int = 0, served: str = "") -> None:
        """Copy the differences to the revision, or to the newest one for 0.

        If the revision was removed, the newest one is copied. Raises LaunchError
        (WorkspaceCopyFailed).
        """
        del served
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
        """Wait for the revision: a network file system may show it later than the annotation."""

        def is_visible() -> bool:
            return os.path.isdir(tree) or self.newest_revision() > revision

        wait_until(is_visible, _SEEN_SECONDS, f"revision {revision} of the workspace")

    def _copy_revision(self, revision: int, tree: str) -> CopyStats:
        """Copy the revision; after the first copy only differences."""
        manifest = self._manifest(revision)
        removed = outdated(self._copied, manifest)
        changed = [path for path, entry in manifest.items() if self._copied.get(path) != entry]
        # The copy fails in the middle if its revision is removed: the next one repeats these paths.
        either = {**self._copied, **manifest}
        unsure = {path: either[path]._replace(size=_UNSURE) for path in (*removed, *changed)}
        self._copied.update(unsure)
        remove(self._target, removed)
        if self.revision:
            copied = _copy_changed(tree, self._target, changed)
            expected = _total(manifest[path] for path in changed)
        else:
            copied = copy_tree(tree, self._target)
            expected = _total(manifest.values())
        if copied != expected:  # a directory that is being removed may look empty, and not missing
            raise OSError(
                f"revision {revision} is incomplete: {counted(copied.files)} and {copied.bytes}"
                f" bytes instead of {counted(expected.files)} and {expected.bytes} bytes"
            )
        self._copied = manifest
        return copied

    def _manifest(self, revision: int) -> dict[str, ManifestEntry]:
        """Entries of the revision's manifest by path. Raises OSError: it may have been removed."""
        with open(os.path.join(self._revision(revision), "manifest"), encoding="utf-8") as file:
            return {entry.path: entry for entry in parse(file.read())}

    def _revision(self, number: int) -> str:
        return os.path.join(self._source, "revisions", str(number))


def outdated(
    copied: Mapping[str, ManifestEntry], manifest: Mapping[str, ManifestEntry]
) -> list[str]:
    """The copied paths that the manifest does not have, or has as an entry of another kind.

    They have to be removed first: a file cannot replace a directory, nor a directory a file.
    """
    return [
        path
        for path, entry in copied.items()
        if path not in manifest or manifest[path].is_file != entry.is_file
    ]


def remove(target: str, paths: Iterable[str]) -> None:
    """Remove files, and directories that become empty."""
    for path in paths:
        full = os.path.join(target, path)
        with suppress(OSError):
            os.rmdir(full) if os.path.isdir(full) else os.unlink(full)
            while path := os.path.dirname(path):
                os.rmdir(os.path.join(target, path))


def _total(entries: Iterable[ManifestEntry]) -> CopyStats:
    sizes = [entry.size for entry in entries if entry.is_file]
    return CopyStats(len(sizes), sum(sizes))


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
    """Modification time of the file; 0 if it does not exist."""
    return os.stat(path).st_mtime if os.path.exists(path) else 0.0


def show_as_newer(path: str, before: float) -> None:
    """Give a replaced file a modification time that differs from the one before.

    Python uses cached bytecode for a source of the same size and second.
    """
    if int(os.stat(path).st_mtime) <= int(before):
        os.utime(path, (before + 1, before + 1))


def copy_tree(source: str, target: str) -> CopyStats:
    """Copy regular files and directories with their permission bits; replaces existing files.

    Raises OSError, also for other kinds of files: a workspace has no links.
    """
    with ThreadPoolExecutor(_THREADS, initializer=_block_signals) as pool:
        done = list(pool.map(_copy_files, _batches(_files(source, target))))
    return CopyStats(sum(copied.files for copied in done), sum(copied.bytes for copied in done))


class _File(NamedTuple):
    source: str
    target: str
    mode: int


def _files(source: str, target: str) -> Iterator[_File]:
    """Yield the files below `source`; creates each directory before its first file."""
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
    """Block all signals, which the main thread handles: a thread that ends could lose one."""
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
