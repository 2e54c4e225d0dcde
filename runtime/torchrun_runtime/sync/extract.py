"""From an archive to a fresh tree, counting every byte that comes out."""

import hashlib
import os
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from torchrun_api.contents import Entry, Manifest
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.modes import give
from torchrun_runtime.sync.settings import Limits
from torchrun_runtime.sync.upload import FULL
from torchrun_runtime.sync.zip_central_directory import count_entries, not_a_zip
from torchrun_runtime.sync.zip_entries import Member, accept

_PIECE = 1 << 20


def extract(archive: Path, tree: Path, limits: Limits) -> Manifest:
    """Extract into `tree`, which must not exist; what it holds then.

    The archive is judged whole before anything is written. Files are readable by all and keep
    the executable bit; nothing else of their mode, owner or time is taken over.

    Raises ArchiveError naming the member at fault; SyncError (WorkspaceFull, not permanent)
    where the tree does not fit; OSError on any other fault of the disk.
    """
    try:
        with archive.open("rb") as file:
            counted = count_entries(file, limits.entries)
            with _opened(file) as opened:
                listed = opened.infolist()
                if len(listed) != counted:
                    raise not_a_zip("it has two central directories that differ; zip it again")
                members = accept(listed, archive.stat().st_size, opened.start_dir, limits)
                check_space(tree.parent, sum(member.size for member in members))
                return _write(opened, members, tree)
    except OSError as error:
        if error.errno in FULL:
            raise workspace_full(error.strerror or "no space") from error
        raise


def _opened(file: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise not_a_zip(str(error)) from error


def _write(opened: zipfile.ZipFile, members: list[Member], tree: Path) -> Manifest:
    tree.mkdir(mode=0o755)
    made: set[tuple[str, ...]] = {()}
    entries = []
    for member in members:
        make_directories(tree, member.path if member.directory else member.path[:-1], made)
        path = "/".join(member.path)
        if not member.directory:
            sha256 = _write_file(opened, member, tree.joinpath(*member.path))
            mode = "755" if member.executable else "644"
            entries.append(Entry(path, sha256, member.size, mode))
    filled = {member.path[:depth] for member in members for depth in range(len(member.path))}
    empty = (member for member in members if member.directory and member.path not in filled)
    entries += (Entry("/".join(member.path), "", 0, "dir") for member in empty)
    return Manifest(entries)


def make_directories(tree: Path, path: tuple[str, ...], made: set[tuple[str, ...]]) -> None:
    """Make the directory and those above it, but for those that are `made` already."""
    for depth in range(1, len(path) + 1):
        if path[:depth] not in made:
            tree.joinpath(*path[:depth]).mkdir(mode=0o755)
            made.add(path[:depth])


def _write_file(opened: zipfile.ZipFile, member: Member, target: Path) -> str:
    """Write the file; the SHA-256 of its content."""
    mode = 0o755 if member.executable else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    written = 0
    digest = hashlib.sha256()
    try:
        with (
            opened.open(member.info) as source,
            os.fdopen(os.open(target, flags, mode), "wb", buffering=0) as file,
        ):
            give(file.fileno(), mode)
            while piece := source.read(_PIECE):
                written += len(piece)
                if written > member.size:
                    break
                digest.update(piece)
                write_all(file.fileno(), piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        message = f"the member {member.name} is damaged: {error or 'it ends too early'}"
        raise ArchiveError("DamagedMember", message) from error
    except FileExistsError as error:
        message = f"the member {member.name} has a name that this file system cannot tell apart"
        raise ArchiveError("DuplicateMember", message) from error
    if written != member.size:
        message = f"the member {member.name} does not have the {member.size} bytes it announces"
        raise ArchiveError("DamagedMember", message)
    return digest.hexdigest()


def write_all(descriptor: int, piece: bytes) -> None:
    """Write every byte. Raises OSError."""
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def check_space(directory: Path, needed: int) -> None:
    """Raises SyncError (WorkspaceFull) where so many bytes do not fit."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise workspace_full(f"{needed} bytes are needed, {free} are free")


def workspace_full(why: str) -> SyncError:
    """The tree does not fit on the claim."""
    message = (
        f"the workspace claim has no room for the extracted archive: {why}; raise "
        "volumes.workspace.size (the archive itself is kept, so it need not be sent again)"
    )
    return SyncError("WorkspaceFull", message, permanent=False)
