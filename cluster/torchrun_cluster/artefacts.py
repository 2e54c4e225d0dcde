"""Files that are costly to make, kept with their checksum and never trusted without it.

An artefact is written to a temporary name and renamed; its record (size and SHA-256) is written
after it, so a crash between the two leaves a file without a record, which is made again. A file
that was verified once is verified again only when its size, time or inode has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """What is known of a whole artefact; `mtime_ns` and `inode` stamp the last full check."""

    size: int
    sha256: str
    mtime_ns: int
    inode: int


def record_path(artefact: Path) -> Path:
    """The record's place beside its artefact."""
    return artefact.with_name(artefact.name + ".record.json")


def is_whole(artefact: Path) -> bool:
    """Whether the file is exactly what `adopt` saw; False for missing, half-written or changed."""
    try:
        record = Record(**json.loads(record_path(artefact).read_text()))
        stat = artefact.stat()
    except (OSError, ValueError, TypeError):
        return False
    if stat.st_size != record.size:
        return False
    if (stat.st_mtime_ns, stat.st_ino) == (record.mtime_ns, record.inode):
        return True
    if sha256_of(artefact) != record.sha256:
        return False
    _write_record(artefact, record.sha256)
    return True


def recorded_sha256(artefact: Path) -> str:
    """The checksum that `adopt` took."""
    return Record(**json.loads(record_path(artefact).read_text())).sha256


def adopt(temporary: Path, artefact: Path) -> None:
    """Put a finished file in its place, replacing what stood there, and record it."""
    digest = sha256_of(temporary)
    artefact.parent.mkdir(parents=True, exist_ok=True)
    record_path(artefact).unlink(missing_ok=True)
    temporary.replace(artefact)
    _write_record(artefact, digest)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder (made when missing, may be deleted); others wait."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDONLY)
        except (FileExistsError, FileNotFoundError):
            if path.exists() and not path.is_dir():
                raise
            continue  # deleted by its holder in the middle of this
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # The holder before us may have deleted the folder: then this lock guards nothing.
            if not _is_open_at(handle, path):
                continue
            yield
            return
        finally:
            os.close(handle)


def _is_open_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _write_record(artefact: Path, digest: str) -> None:
    stat = artefact.stat()
    record = Record(stat.st_size, digest, stat.st_mtime_ns, stat.st_ino)
    temporary = record_path(artefact).with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(record_path(artefact))
