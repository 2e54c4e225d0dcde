"""The common end of every source: what was judged is written, and nothing else."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from torchrun_api.contents import Entry, Manifest
from torchrun_runtime.sync import paths
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.extract import make_directories, write_all
from torchrun_runtime.sync.modes import give
from torchrun_runtime.sync.paths import Place
from torchrun_runtime.sync.settings import Limits


class Tree:
    """A fresh directory that files are written to, each at its place.

    Files are readable by all and keep the executable bit; nothing else of their mode, owner or
    time is taken over.
    """

    def __init__(self, directory: Path) -> None:
        """Make the directory, which must not exist. Raises OSError."""
        directory.mkdir(mode=0o755)
        self._directory = directory
        self._made: set[paths.Path] = {()}
        self._entries: list[Entry] = []

    @property
    def held(self) -> Manifest:
        """What it holds by now."""
        return Manifest(self._entries)

    def add_file(self, place: Place, pieces: Iterable[bytes]) -> None:
        """Write one file. Raises ArchiveError unless it has exactly the size of its place."""
        make_directories(self._directory, place.path[:-1], self._made)
        mode = 0o755 if place.executable else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        target = self._directory.joinpath(*place.path)
        try:
            descriptor = os.open(target, flags, mode)
        except FileExistsError as error:
            message = f"the member {place.name} has a name that this file system cannot tell apart"
            raise ArchiveError("DuplicateMember", message) from error
        written, digest = 0, hashlib.sha256()
        try:
            give(descriptor, mode)
            for piece in pieces:
                written += len(piece)
                if written > place.size:
                    break
                digest.update(piece)
                write_all(descriptor, piece)
        finally:
            os.close(descriptor)
        if written != place.size:
            message = f"the member {place.name} does not have the {place.size} bytes it announces"
            raise ArchiveError("DamagedMember", message)
        path = "/".join(place.path)
        self._entries.append(Entry(path, digest.hexdigest(), written, f"{mode:o}"))


def judge(places: list[Place], limits: Limits) -> None:
    """Raises ArchiveError where they make no workspace together."""
    if not places:
        raise ArchiveError("EmptyWorkspace", "there is nothing at volumes.workspace's url and path")
    if len(places) > limits.entries:
        raise too_many(limits)
    paths.refuse_collisions(places)
    total = sum(place.size for place in places)
    if total > limits.bytes:
        message = (
            f"the workspace has {total} bytes, allowed are {limits.bytes}; "
            "leave data out of it and mount it from a claim"
        )
        raise ArchiveError("WorkspaceTooLarge", message)


def too_many(limits: Limits) -> ArchiveError:
    """The refusal of more members than are allowed; whoever lists them stops there."""
    message = f"the workspace has more than {limits.entries} files; choose a part of it by subPath"
    return ArchiveError("TooManyEntries", message)


def workspace_full(why: str) -> SyncError:
    """The claim has no room: another size may mend it, and so may another ref."""
    message = f"the workspace claim is full: {why}; raise volumes.workspace.size in a new job"
    return SyncError("WorkspaceFull", message, permanent=False)
