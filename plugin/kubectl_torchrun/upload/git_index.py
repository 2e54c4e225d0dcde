"""The paths that git tracks: its index (https://git-scm.com/docs/index-format), versions 2 to 4.

Read without git, which may not be installed, and which starts programs that the configuration of a
foreign repository names (core.fsmonitor).
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

_LONGEST_PATH = 4096  # bytes
_STATUS_SIZE = 40  # of an entry, before the name of the object and the flags
_EXTENDED = 0x4000  # flag of an entry with two more bytes of flags


class GitIndexError(ValueError):
    """An index that git has not written, or of a later version."""


def tracked(top: Path) -> frozenset[str]:
    """The tracked paths of the repository with this top directory, with all their directories.

    Submodules are paths. Empty if nothing was added yet. Raises OSError, GitIndexError.
    """
    return _tracked_in(_folder(top), "index")


def _tracked_in(folder: Path, name: str) -> frozenset[str]:
    try:
        status = (folder / name).stat()
    except FileNotFoundError:
        return frozenset()
    return _read(folder, name, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=64)  # `sync --watch` scans again and again
def _read(folder: Path, name: str, *_: int) -> frozenset[str]:
    data = (folder / name).read_bytes()
    try:
        paths, end = _paths(data)
        shared = _shared_index(data, end)
    except (IndexError, ValueError) as error:
        raise GitIndexError(f"not an index of git: {error}") from error
    tracked = frozenset(_with_directories(paths))
    return tracked | _tracked_in(folder, f"sharedindex.{shared}") if shared else tracked


def _folder(top: Path) -> Path:
    """The directory with the index: `.git`, or the one that this file names, as in submodules."""
    dot_git = top / ".git"
    if dot_git.is_dir():
        return dot_git
    named = os.fsdecode(dot_git.read_bytes()).partition("gitdir:")[2].strip()
    return top / named


def _with_directories(paths: list[str]) -> set[str]:
    out: set[str] = set()
    for path in paths:
        while path and path not in out:
            out.add(path)
            path = path.rpartition("/")[0]
    return out


def _paths(data: bytes) -> tuple[list[str], int]:
    """The path of each entry, and the end of the entries. Raises ValueError, IndexError."""
    version, count = _header(data)
    hash_size, position, path = _hash_size(data), 12, b""
    paths = []
    for _ in range(count):
        flags_at = position + _STATUS_SIZE + hash_size
        extended = int.from_bytes(data[flags_at : flags_at + 2], "big") & _EXTENDED
        name_at = flags_at + (4 if extended else 2)
        dropped = len(path)
        if version == 4:
            dropped, name_at = _variable_number(data, name_at)
        end = data.index(b"\0", name_at)
        path = path[: max(len(path) - dropped, 0)] + data[name_at:end]
        if len(path) > _LONGEST_PATH:
            raise ValueError("a path is too long")
        # Versions 2 and 3 fill up to eight bytes.
        position = end + 1 if version == 4 else position + (end - position + 8) // 8 * 8
        paths.append(os.fsdecode(path))
    return paths, position


def _shared_index(data: bytes, position: int) -> str:
    """The name of the index that has the other entries (core.splitIndex); "" without one."""
    hash_size = _hash_size(data)
    while position + 8 <= len(data) - hash_size:
        size = int.from_bytes(data[position + 4 : position + 8], "big")
        if data[position : position + 4] == b"link":
            return data[position + 8 : position + 8 + hash_size].hex()
        position += 8 + size
    return ""


def _header(data: bytes) -> tuple[int, int]:
    version, count = int.from_bytes(data[4:8], "big"), int.from_bytes(data[8:12], "big")
    if data[:4] != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("its version is unknown")
    return version, count


def _hash_size(data: bytes) -> int:
    """The size of names of objects, by the checksum at the end, which git may leave zero."""
    is_sha256 = data[-32:] in (bytes(32), hashlib.sha256(data[:-32]).digest())
    return 32 if is_sha256 else 20


def _variable_number(data: bytes, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the position after it."""
    value = data[position] & 0x7F
    while data[position] & 0x80:
        position += 1
        value = (value + 1 << 7) | (data[position] & 0x7F)
    return value, position + 1
