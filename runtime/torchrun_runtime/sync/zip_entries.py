"""The checks of the entries of a zip archive, before the first byte is extracted."""

import stat
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass

from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.paths import Place, components, refuse_collisions, refused
from torchrun_runtime.sync.settings import Limits

_ENCRYPTED = 0x1 | 0x40
_NAME_IS_UTF8 = 0x800
_LOCAL_HEADER = 30  # bytes before the name, APPNOTE.TXT 4.3.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(Place):
    """One accepted member of a zip archive."""

    info: zipfile.ZipInfo


def accept(
    entries: Iterable[zipfile.ZipInfo], archive_size: int, directory_start: int, limits: Limits
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


def _member(info: zipfile.ZipInfo, limits: Limits) -> Member:
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


def refuse_size(total: int, limits: Limits) -> None:
    """Raises ArchiveError if a workspace has too many bytes."""
    if total > limits.bytes:
        message = (
            f"The archive contains {total} bytes. The limit is {limits.bytes}. Move data out of the"
            " workspace and mount it from a PVC."
        )
        raise ArchiveError("WorkspaceTooLarge", message)


def _refuse_bomb(total: int, archive_size: int, limits: Limits) -> None:
    refuse_size(total, limits)
    if total > limits.ratio_floor and total > archive_size * limits.ratio:
        message = (
            f"The archive expands from {archive_size} to {total} bytes, more than {limits.ratio}"
            " times its size, like a decompression bomb. Leave out files of zeros."
        )
        raise ArchiveError("CompressionRatio", message)
