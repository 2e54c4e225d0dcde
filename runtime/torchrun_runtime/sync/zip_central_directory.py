"""The central directory of a zip archive: its entries are counted before zipfile reads it.

zipfile reads the whole central directory and creates an object for each entry; ten million entries
would need gigabytes of memory, as would long comments. So it is measured, and the entries are
counted, one header at a time. Layout and
numbers: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.12 to 4.3.16.
"""

import os
import struct
from typing import BinaryIO

from torchrun_api.contents import LARGEST_TEXT
from torchrun_runtime.sync.errors import ArchiveError

_END_SIGNATURE = b"PK\x05\x06"
_END_SIZE = 22
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_LOCATOR_SIZE = 20
_END64_SIGNATURE = b"PK\x06\x06"
_END64_SIZE = 56
_HEADER = struct.Struct("<4s24x3H12x")  # signature, lengths of name, extra field and comment
_HEADER_SIGNATURE = b"PK\x01\x02"
_LONGEST_COMMENT = 0xFFFF


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
