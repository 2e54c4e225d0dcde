"""Which members of an archive are accepted, decided before the first byte is extracted.

Nothing is repaired: a name that would need cleaning is refused with the name in the message, as
every tool repairs differently and a silently renamed file is a bug in somebody's training.
"""

import stat
import unicodedata
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass

from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.settings import Limits

_ENCRYPTED = 0x1 | 0x40
_NAME_IS_UTF8 = 0x800
_LOCAL_HEADER = 30  # bytes before the name, APPNOTE.TXT 4.3.7
_LONGEST_NAME = 255  # NAME_MAX, bytes
_SHOWN_NAME = 120  # characters of a name that a message shows


@dataclass(frozen=True)
class Member:
    """One accepted member. path: components; size: bytes announced, an upper bound."""

    info: zipfile.ZipInfo
    path: tuple[str, ...]
    directory: bool
    executable: bool
    size: int

    @property
    def name(self) -> str:
        """The path as a message shows it."""
        return shown("/".join(self.path))


def accept(
    entries: Iterable[zipfile.ZipInfo], archive_size: int, directory_start: int, limits: Limits
) -> list[Member]:
    """Members in the archive's order.

    archive_size: bytes; directory_start: where the central directory starts.
    Raises ArchiveError naming the first member that is not acceptable.
    """
    infos = list(entries)
    members = [_member(info, limits) for info in infos]
    _refuse_collisions(members)
    _refuse_overlaps(infos, directory_start)
    _refuse_bomb(sum(member.size for member in members), archive_size, limits)
    return members


def shown(name: str) -> str:
    """A name as messages and logs may carry it: quoted, escaped, shortened."""
    cut = name if len(name) <= _SHOWN_NAME else name[:_SHOWN_NAME] + "..."
    return ascii(cut) if not cut.isprintable() else repr(cut)


def _member(info: zipfile.ZipInfo, limits: Limits) -> Member:
    name = _name(info)
    directory = name.endswith("/")
    path = _path(name, limits)
    mode = info.external_attr >> 16
    _refuse_type(name, mode, directory)
    if info.flag_bits & _ENCRYPTED:
        raise _refused("EncryptedMember", name, "is encrypted; make the archive without a password")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _refused(
            "UnsupportedCompression",
            name,
            f"is compressed by method {info.compress_type}; use deflate (zip's default) or store",
        )
    if directory and (info.file_size or info.compress_size):
        raise _refused("UnsafeMember", name, "is a directory with content")
    return Member(info, path, directory, bool(mode & 0o111), info.file_size)


def _name(info: zipfile.ZipInfo) -> str:
    """The full name: `filename` of zipfile ends at the first NUL."""
    name = info.orig_filename
    if name.isascii() or info.flag_bits & _NAME_IS_UTF8:
        return name
    # Some tools write UTF-8 without saying so; zipfile has then read it as code page 437.
    try:
        return name.encode("cp437").decode("utf-8")
    except UnicodeError:
        raise _refused(
            "UnsafeName", name, "has a name that is not UTF-8; make the archive with UTF-8 names"
        ) from None


def _path(name: str, limits: Limits) -> tuple[str, ...]:
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise _refused("UnsafeName", name, "has a control character in its name")
    if "\\" in name:
        raise _refused("UnsafeName", name, "has a backslash in its name; separate by '/'")
    if name.startswith("/"):
        raise _refused("UnsafeName", name, "has an absolute path; paths must be relative")
    if len(name.encode()) > limits.path:
        raise _refused("PathTooLong", name, f"has a path of more than {limits.path} bytes")
    path = tuple(name.removesuffix("/").split("/"))
    if len(path) > limits.depth:
        raise _refused("PathTooDeep", name, f"lies more than {limits.depth} levels deep")
    for part in path:
        if part in ("", ".", ".."):
            raise _refused("UnsafeName", name, f"has the component {part!r} in its path")
        if len(part.encode()) > _LONGEST_NAME:
            raise _refused(
                "PathTooLong", name, f"has a component of more than {_LONGEST_NAME} bytes"
            )
    return path


def _refuse_type(name: str, mode: int, directory: bool) -> None:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFLNK:
        raise _refused(
            "UnsafeMember", name, "is a symbolic link; archive the file that it points to (zip -r)"
        )
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _refused("UnsafeMember", name, "is neither a file nor a directory")
    if kind == (stat.S_IFREG if directory else stat.S_IFDIR):
        raise _refused("UnsafeMember", name, "is a directory by name or by type, but not by both")


def _refuse_collisions(members: list[Member]) -> None:
    files: set[tuple[str, ...]] = set()
    directories: set[tuple[str, ...]] = set()
    for member in members:
        if member.path in files or (member.directory and member.path in directories):
            raise _refused("DuplicateMember", "/".join(member.path), "is in the archive twice")
        (directories if member.directory else files).add(member.path)
    parents = {member.path[:depth] for member in members for depth in range(1, len(member.path))}
    for path in files:
        if path in parents or path in directories:
            raise _refused(
                "DuplicateMember", "/".join(path), "is both a file and a directory of the archive"
            )


def _refuse_overlaps(infos: list[zipfile.ZipInfo], directory_start: int) -> None:
    """Members that share compressed bytes are how a small archive becomes petabytes."""
    end = directory_start
    for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
        start = info.header_offset
        encoding = "utf-8" if info.flag_bits & _NAME_IS_UTF8 else "cp437"
        shortest = _LOCAL_HEADER + len(info.orig_filename.encode(encoding)) + info.compress_size
        if start < 0 or start + shortest > end:
            raise _refused(
                "OverlappingMembers", info.orig_filename, "shares its bytes with another member"
            )
        end = start


def _refuse_bomb(total: int, archive_size: int, limits: Limits) -> None:
    if total > limits.bytes:
        message = (
            f"the archive holds {total} bytes, allowed are {limits.bytes}; "
            "leave data out of the workspace and mount it from a claim"
        )
        raise ArchiveError("ArchiveTooLarge", message)
    if total > limits.ratio_floor and total > archive_size * limits.ratio:
        message = (
            f"the archive's {archive_size} bytes hold {total}, more than {limits.ratio} times as "
            "many: it looks like a decompression bomb; leave files of zeros out"
        )
        raise ArchiveError("CompressionRatio", message)


def _refused(reason: str, name: str, why: str) -> ArchiveError:
    return ArchiveError(reason, f"the member {shown(name)} {why}")
