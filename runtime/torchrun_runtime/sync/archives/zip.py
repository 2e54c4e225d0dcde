"""From a zip archive to a new tree: every member is checked first, every byte is counted.

zipfile reads the whole central directory and creates an object for each entry; ten million entries
would need gigabytes of memory, as would long comments. So it is measured, and the entries are
counted, one header at a time. Layout and numbers: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.12 to
4.3.16.
"""

import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchrun_api.contract.contents import LARGEST_TEXT, Manifest
from torchrun_runtime.sync.errors import FULL, ArchiveError, workspace_full
from torchrun_runtime.sync.paths import PlannedPath, components, refuse_collisions, refused
from torchrun_runtime.sync.settings import ArchiveLimits
from torchrun_runtime.sync.tree import NewTree

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
_ENCRYPTED = 0x1 | 0x40
_NAME_IS_UTF8 = 0x800
_LOCAL_HEADER = 30  # bytes before the name, APPNOTE.TXT 4.3.7
_END_SIGNATURE = b"PK\x05\x06"
_END_SIZE = 22
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_LOCATOR_SIZE = 20
_END64_SIGNATURE = b"PK\x06\x06"
_END64_SIZE = 56
_HEADER = struct.Struct("<4s24x3H12x")  # signature, lengths of name, extra field and comment
_HEADER_SIGNATURE = b"PK\x01\x02"
_LONGEST_COMMENT = 0xFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(PlannedPath):
    """One accepted member of a zip archive."""

    info: zipfile.ZipInfo


def extract(
    archive: Path, tree: Path, limits: ArchiveLimits, advance: Callable[[], None] = lambda: None
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
    tree = NewTree(directory)
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


def accept(
    entries: Iterable[zipfile.ZipInfo],
    archive_size: int,
    directory_start: int,
    limits: ArchiveLimits,
) -> list[Member]:
    """The members in the order of the archive.

    archive_size: bytes; directory_start: where the central directory starts.
    Raises ArchiveError with the first member that is not acceptable.
    """
    infos = list(entries)
    members = [_member(info, limits) for info in infos]
    refuse_collisions(members)
    _refuse_overlaps(infos, directory_start)
    _refuse_bomb(sum(member.size for member in members), archive_size, limits)
    return members


def _member(info: zipfile.ZipInfo, limits: ArchiveLimits) -> Member:
    name = _name(info)
    directory = name.endswith("/")
    path = components(name, limits)
    mode = info.external_attr >> 16
    _refuse_type(name, mode, directory)
    if info.flag_bits & _ENCRYPTED:
        raise refused("InvalidArchive", name, "is encrypted. Create the archive without a password")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise refused(
            "InvalidArchive",
            name,
            f"uses compression method {info.compress_type}. Use deflate (zip's default) or store",
        )
    if directory and (info.file_size or info.compress_size):
        raise refused("InvalidFile", name, "is a directory with content")
    return Member(
        path=path,
        directory=directory,
        executable=bool(mode & 0o111),
        size=info.file_size,
        info=info,
    )


def _name(info: zipfile.ZipInfo) -> str:
    """The full name, because `filename` of zipfile ends at the first NUL."""
    name = info.orig_filename
    if name.isascii() or info.flag_bits & _NAME_IS_UTF8:
        return name
    # Some tools write UTF-8 without its flag. zipfile then decodes it as code page 437.
    try:
        return name.encode("cp437").decode("utf-8")
    except UnicodeError:
        raise refused(
            "InvalidFile", name, "has a name that is not UTF-8. Create the archive with UTF-8 names"
        ) from None


def _refuse_type(name: str, mode: int, directory: bool) -> None:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFLNK:
        raise refused(
            "InvalidFile", name, "is a symbolic link. Archive the file that it points to (zip -r)"
        )
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise refused("InvalidFile", name, "is neither a file nor a directory")
    if kind == (stat.S_IFREG if directory else stat.S_IFDIR):
        raise refused(
            "InvalidFile",
            name,
            "is a directory by name but not by type, or by type but not by name",
        )


def _refuse_overlaps(infos: list[zipfile.ZipInfo], directory_start: int) -> None:
    """Refuse members that share compressed bytes: a small archive could become petabytes."""
    end = directory_start
    for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
        start = info.header_offset
        encoding = "utf-8" if info.flag_bits & _NAME_IS_UTF8 else "cp437"
        shortest = _LOCAL_HEADER + len(info.orig_filename.encode(encoding)) + info.compress_size
        if start < 0 or start + shortest > end:
            raise refused(
                "InvalidArchive", info.orig_filename, "shares its bytes with another entry"
            )
        end = start


def refuse_size(total: int, limits: ArchiveLimits) -> None:
    """Raises ArchiveError if a workspace has too many bytes."""
    if total > limits.bytes:
        message = (
            f"The archive contains {total} bytes. The limit is {limits.bytes}. Move data out of the"
            " workspace and mount it from a PVC."
        )
        raise ArchiveError("WorkspaceTooLarge", message)


def _refuse_bomb(total: int, archive_size: int, limits: ArchiveLimits) -> None:
    refuse_size(total, limits)
    if total > limits.ratio_floor and total > archive_size * limits.ratio:
        message = (
            f"The archive expands from {archive_size} to {total} bytes, more than {limits.ratio}"
            " times its size, like a decompression bomb. Leave out files of zeros."
        )
        raise ArchiveError("CompressionRatio", message)


def count_entries(file: BinaryIO, most: int) -> int:
    """Number of entries of the central directory.

    Raises ArchiveError: InvalidArchive, or WorkspaceTooLarge as soon as there are more than `most`.
    """
    position, remaining = _locate(file)
    if remaining > LARGEST_TEXT:
        raise ArchiveError(
            "WorkspaceTooLarge",
            f"The list of files in the archive has {remaining} bytes. The limit is {LARGEST_TEXT}."
            " Leave out extra fields and comments.",
        )
    file.seek(position)
    entries = 0
    while remaining > 0:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_HEADER_SIGNATURE):
            raise not_a_zip("its central directory is damaged")
        _, name, extra, comment = _HEADER.unpack(header)
        file.seek(name + extra + comment, os.SEEK_CUR)
        remaining -= _HEADER.size + name + extra + comment
        entries += 1
        if entries > most:
            message = (
                f"The archive has more than {most} entries. Leave out files that the training does"
                " not need (.torchrunignore), or mount them from a PVC."
            )
            raise ArchiveError("WorkspaceTooLarge", message)
    if remaining < 0:
        raise not_a_zip("its central directory is damaged")
    return entries


def not_a_zip(why: str) -> ArchiveError:
    """The error for data that is not a zip archive. why: without a full stop."""
    return ArchiveError("InvalidArchive", f"The file is not a valid zip archive: {why}.")


def _locate(file: BinaryIO) -> tuple[int, int]:
    """Return start and length of the central directory in bytes, as zipfile finds them."""
    length = file.seek(0, os.SEEK_END)
    start = max(0, length - _END_SIZE - _LONGEST_COMMENT - 1)
    file.seek(start)
    tail = file.read()
    last = len(tail) - _END_SIZE
    without_comment = tail[-_END_SIZE:].startswith(_END_SIGNATURE) and tail.endswith(b"\0\0")
    at = last if without_comment else tail.rfind(_END_SIGNATURE)
    if at < 0 or at > last:
        raise not_a_zip("it has no end of central directory record")
    (size,) = struct.unpack_from("<L", tail, at + 12)
    end = start + at
    end64 = end - _LOCATOR_SIZE - _END64_SIZE
    if end64 >= 0 and _has_end64(file, end64):
        file.seek(end64 + 40)
        (size,) = struct.unpack("<Q", file.read(8))
        end = end64
    if size > end:
        raise not_a_zip("its central directory is longer than the file")
    return end - size, size


def _has_end64(file: BinaryIO, at: int) -> bool:
    """Whether a zip64 end record is at `at`, directly before its locator.

    Newer releases of zipfile use the offset in the locator, older ones the position directly before
    it. So an archive in which the two differ is refused: one would be counted, the other read.
    """
    file.seek(at)
    records = file.read(_END64_SIZE + _LOCATOR_SIZE)
    if not records[_END64_SIZE:].startswith(_LOCATOR_SIGNATURE):
        return False
    if not records.startswith(_END64_SIGNATURE):
        raise not_a_zip("its zip64 record is not directly before its locator")
    (offset,) = struct.unpack_from("<Q", records, _END64_SIZE + 8)
    if offset < at:
        file.seek(offset)
        if file.read(len(_END64_SIGNATURE)) == _END64_SIGNATURE:
            raise not_a_zip("it has two zip64 records")
    return True
