"""From a tar archive to a new tree: every member is checked first, every byte is counted.

tarfile reads the payload of a header (long names, PAX records) at once, regardless of its size. So
it gets a file that returns at most a mebibyte at a time and counts the decompressed bytes.
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torchrun_api.contract.contents import Manifest
from torchrun_runtime.sync.archives.zip import check_space
from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.paths import PlannedPath, components, refused
from torchrun_runtime.sync.settings import ArchiveLimits
from torchrun_runtime.sync.tree import NewTree, check_places, too_many

_PIECE = 1 << 20
_MOST_GLOBAL_RECORDS = 64
_HEADERS = 8192  # bytes for one member: header block and padding, a long name, PAX records
_GZIP = b"\x1f\x8b"
_FAULTS = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError)


def extract_tar(archive: Path, tree: Path, limits: ArchiveLimits) -> Manifest:
    """Extract into `tree`, which must not exist; returns the manifest.

    Raises ArchiveError with the invalid member; SyncError (WorkspaceFull) if the tree does not fit;
    OSError for other errors of the disk.
    """
    try:
        with _tar_file(archive, limits) as tar_file:
            places = [_place(member, limits) for member in _members(tar_file, limits)]
        check_places([place for place in places if place.path], limits)
        check_space(tree.parent, sum(place.size for place in places))
        with _tar_file(archive, limits) as tar_file:
            return _write(tar_file, places, tree, limits)
    except RecursionError as error:
        # tarfile recurses for each header that only describes the next one.
        message = "The file is not a valid tar archive: its headers never end. Create it with tar."
        raise ArchiveError("InvalidArchive", message) from error
    except _FAULTS as error:
        message = f"The file is not a valid tar archive: {error}."
        raise ArchiveError("InvalidArchive", message) from error


@contextmanager
def _tar_file(archive: Path, limits: ArchiveLimits) -> Iterator[tarfile.TarFile]:
    with ExitStack() as stack:
        raw = stack.enter_context(archive.open("rb"))
        compressed = raw.read(2) == _GZIP
        raw.seek(0)
        source: io.BufferedReader | gzip.GzipFile = raw
        most = limits.bytes + limits.entries * _HEADERS + _PIECE
        if compressed:
            source = stack.enter_context(gzip.GzipFile(fileobj=raw))
            most = min(most, max(limits.ratio_floor, archive.stat().st_size * limits.ratio))
        bounded = _Bounded(source, most)
        yield stack.enter_context(tarfile.TarFile(fileobj=bounded, mode="r", errorlevel=2))


class _Bounded(io.RawIOBase):
    """A file with a limit for each read, and for the sum of all reads (`most`)."""

    def __init__(self, source: io.BufferedReader | gzip.GzipFile, most: int) -> None:
        self._source = source
        self._most = most
        self._at = 0
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _PIECE:
            message = f"A header of the archive has {size} bytes. The limit is {_PIECE}."
            raise ArchiveError("InvalidFile", message)
        self.last = self._source.read(size)
        self._advance(len(self.last))
        return self.last

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Seek forward with reads, so that skipped bytes are counted, too."""
        if whence != io.SEEK_SET or offset < 0:
            raise tarfile.ReadError("the archive jumps")
        if offset < self._at:
            self._at = self._source.seek(offset)
        while self._at < offset:
            piece = self._source.read(min(_PIECE, offset - self._at))
            if not piece:
                raise EOFError("it ends too early")
            self._advance(len(piece))
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > self._most:
            message = (
                f"The archive expands to more than {self._most} bytes. It is too large, or a"
                " decompression bomb."
            )
            raise ArchiveError("CompressionRatio", message)


def _members(tar_file: tarfile.TarFile, limits: ArchiveLimits) -> Iterator[tarfile.TarInfo]:
    """Yield the members, and drop each: tarfile would keep every one with its headers."""
    count = 0
    while (member := tar_file.next()) is not None:
        count += 1
        if count > limits.entries:
            raise too_many(limits)
        if len(tar_file.pax_headers) > _MOST_GLOBAL_RECORDS:
            raise ArchiveError(
                "InvalidFile", f"The archive has more than {_MOST_GLOBAL_RECORDS} global records."
            )
        tar_file.members = []  # type: ignore[attr-defined]
        yield member
    # tarfile stops at any invalid header; the valid end of an archive is a block of zeros.
    assert isinstance(tar_file.fileobj, _Bounded)
    if tar_file.fileobj.last != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it is damaged or ends too early")
    while tar_file.fileobj.read(_PIECE):
        pass  # the data is not needed, but the checksum of gzip follows it


def _place(member: tarfile.TarInfo, limits: ArchiveLimits) -> PlannedPath:
    name = member.name
    if name in (".", "./"):
        return PlannedPath((), directory=True)
    path = components(name.removeprefix("./"), limits)
    if member.issym() or member.islnk():
        advice = "tar --hard-dereference" if member.islnk() else "tar -h"
        raise refused("InvalidFile", name, f"is a link. Archive the file itself ({advice})")
    if member.issparse():
        raise refused("InvalidFile", name, "is sparse. Archive it without --sparse")
    if not (member.isreg() or member.isdir()):
        raise refused("InvalidFile", name, "is neither a file nor a directory")
    if member.size < 0:
        raise refused("InvalidFile", name, "has a negative size")
    size = member.size if member.isreg() else 0
    return PlannedPath(path, member.isdir(), bool(member.mode & 0o111), size)


def _write(
    tar_file: tarfile.TarFile, places: list[PlannedPath], tree: Path, limits: ArchiveLimits
) -> Manifest:
    result = NewTree(tree)
    remaining = iter(places)
    for member in _members(tar_file, limits):
        place = next(remaining)
        if member.isreg():
            result.add_file(place, _pieces(tar_file, member))
        elif place.path:
            result.add_directory(place)
    return result.manifest


def _pieces(tar_file: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    source = tar_file.extractfile(member)
    assert source is not None
    while piece := source.read(_PIECE):
        yield piece
