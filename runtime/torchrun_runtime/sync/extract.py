"""From a zip archive to a new tree: every member is checked first, every byte is counted."""

import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from torchrun_api.contents import Manifest
from torchrun_runtime.sync.errors import FULL, ArchiveError, workspace_full
from torchrun_runtime.sync.settings import Limits
from torchrun_runtime.sync.tree import Tree
from torchrun_runtime.sync.zip_central_directory import count_entries, not_a_zip
from torchrun_runtime.sync.zip_entries import Member, accept

_PIECE = 1 << 20
# ValueError: a name in a local header that is not UTF-8, although its flag says so.
_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
)


def extract(
    archive: Path, tree: Path, limits: Limits, advance: Callable[[], None] = lambda: None
) -> Manifest:
    """Extract into `tree`, which must not exist; returns the manifest.

    All members are checked before anything is written. Calls `advance` after each member and each
    piece of one.

    Raises ArchiveError with the invalid member; SyncError (WorkspaceFull, not permanent) if the
    tree does not fit; OSError for other errors of the disk.
    """
    try:
        with archive.open("rb") as file:
            counted = count_entries(file, limits.entries)
            with _zip_file(file) as zip_file:
                listed = zip_file.infolist()
                if len(listed) != counted:
                    raise not_a_zip("it has two central directories that differ")
                members = accept(listed, archive.stat().st_size, zip_file.start_dir, limits)
                check_space(tree.parent, sum(member.size for member in members))
                return _write(zip_file, members, tree, advance)
    except OSError as error:
        if error.errno in FULL:
            raise workspace_full(error.strerror or "no space") from error
        raise


def _zip_file(file: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise not_a_zip(str(error)) from error


def _write(
    zip_file: zipfile.ZipFile, members: list[Member], directory: Path, advance: Callable[[], None]
) -> Manifest:
    tree = Tree(directory)
    for member in members:
        if member.directory:
            tree.add_directory(member)
        else:
            tree.add_file(member, _pieces(zip_file, member, advance))
        advance()
    return tree.manifest


def _pieces(
    zip_file: zipfile.ZipFile, member: Member, advance: Callable[[], None]
) -> Iterator[bytes]:
    """Yield the content of one member. Raises ArchiveError if it is damaged."""
    try:
        with zip_file.open(member.info) as source:
            while piece := source.read(_PIECE):
                yield piece
                advance()
    except _FAULTS as error:
        message = f"Entry {member.name} is damaged: {error or 'it ends too early'}."
        raise ArchiveError("InvalidArchive", message) from error


def check_space(directory: Path, needed: int) -> None:
    """Raises SyncError (WorkspaceFull) if the directory has no room for `needed` bytes."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise workspace_full(f"the archive needs {needed} bytes and {free} are free")
