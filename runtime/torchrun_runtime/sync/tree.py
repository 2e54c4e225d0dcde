"""The last step of every source: write the checked files."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torchrun_api.contract.contents import Entry, Manifest
from torchrun_runtime.sync import paths
from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.paths import PlannedPath
from torchrun_runtime.sync.settings import ArchiveLimits


class NewTree:
    """A new directory for the files of a workspace.

    Files are readable by all and keep the executable bit, but not the rest of their mode, owner
    or time.
    """

    def __init__(self, directory: Path) -> None:
        """Create the directory, which must not exist. Raises OSError."""
        directory.mkdir(mode=0o755)
        self._directory = directory
        self._existing: set[paths.Path] = {()}
        self._files: list[Entry] = []
        self._directories: list[paths.Path] = []
        self._parents: set[paths.Path] = set()

    @property
    def manifest(self) -> Manifest:
        """The files so far, and the empty directories."""
        empty = (path for path in self._directories if path not in self._parents)
        return Manifest([*self._files, *(Entry("/".join(path), "", 0, "dir") for path in empty)])

    def add_directory(self, place: PlannedPath) -> None:
        """Create a directory, which may remain empty. Raises OSError."""
        self._make(place.path, place.path)
        self._directories.append(place.path)

    def add_file(self, place: PlannedPath, pieces: Iterable[bytes]) -> None:
        """Write one file. Raises ArchiveError if it has another size than its place."""
        self._make(place.path, place.path[:-1])
        mode = 0o755 if place.executable else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        target = self._directory.joinpath(*place.path)
        try:
            descriptor = os.open(target, flags, mode)
        except FileExistsError as error:
            message = (
                f"Entry {place.name} has the same name as another one on this file system."
                " Rename one of them."
            )
            raise ArchiveError("InvalidFile", message) from error
        size, digest = 0, hashlib.sha256()
        try:
            give(descriptor, mode)
            for piece in pieces:
                size += len(piece)
                if size > place.size:
                    break
                digest.update(piece)
                _write_all(descriptor, piece)
        finally:
            os.close(descriptor)
        if size != place.size:
            message = f"Entry {place.name} does not have the {place.size} bytes of its header."
            raise ArchiveError("InvalidArchive", message)
        path = "/".join(place.path)
        self._files.append(Entry(path, digest.hexdigest(), size, f"{mode:o}"))

    def _make(self, path: paths.Path, directory: paths.Path) -> None:
        """Create the directory of `path`, and record its parents."""
        make_directories(self._directory, directory, self._existing)
        self._parents.update(path[:depth] for depth in range(len(path)))


def make_directories(tree: Path, path: paths.Path, existing: set[paths.Path]) -> None:
    """Create the directory and its parents, except those in `existing`, and add them to it."""
    for depth in range(1, len(path) + 1):
        if path[:depth] not in existing:
            tree.joinpath(*path[:depth]).mkdir(mode=0o755)
            existing.add(path[:depth])


def _write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def check_places(places: list[PlannedPath], limits: ArchiveLimits) -> None:
    """Raises ArchiveError if these files cannot form a workspace."""
    if all(place.directory for place in places):
        raise ArchiveError(
            "EmptyWorkspace", "The workspace has no files. Check volumes.workspace.url and subPath."
        )
    if len(places) > limits.entries:
        raise too_many(limits)
    paths.refuse_collisions(places)
    total = sum(place.size for place in places)
    if total > limits.bytes:
        message = (
            f"The workspace has {total} bytes. The limit is {limits.bytes}. Move data out of it and"
            " mount it from a PVC."
        )
        raise ArchiveError("WorkspaceTooLarge", message)


def too_many(limits: ArchiveLimits) -> ArchiveError:
    """Return the error for too many files; the listing stops there."""
    message = f"The workspace has more than {limits.entries} files. Select a part with subPath."
    return ArchiveError("WorkspaceTooLarge", message)


def give(target: Path | int, mode: int) -> None:
    """Set the mode of a path or of an open file, if the file system supports modes.

    On a share of a single user (SMB) the mount determines the modes, and every change fails with
    EPERM.
    """
    with suppress(PermissionError):
        os.chmod(target, mode)
