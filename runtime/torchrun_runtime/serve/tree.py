"""The files of the newest revision, for requests of workers."""

import hashlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchrun_api.contract.contents import Entry, parse
from torchrun_runtime.sync.claim import Claim

_BLOCK = 1 << 20


class NotThereError(Exception):
    """The request is for another workspace than the served one."""


class Revision(NamedTuple):
    """One revision. sha256, entries, packed: of its manifest; packed is the compressed text."""

    number: int
    sha256: str
    entries: tuple[Entry, ...]
    packed: bytes


class ServedTree:
    """The workspace of a directory that torchrun-sync writes.

    Its methods block, and may be called from any thread.
    """

    def __init__(self, directory: Path) -> None:
        self._claim = Claim(directory)
        self._lock = threading.Lock()
        self._revision: Revision | None = None

    def ready(self) -> bool:
        """Whether there is a complete workspace."""
        return self._claim.marker() is not None

    def newest(self) -> Revision | None:
        """The revision of the marker; None without a marker. Raises OSError, ManifestError.

        A new revision is read once, however many workers wait for it: 200,000 files need a second
        of a CPU and a large part of the pod's memory.
        """
        with self._lock:
            marker = self._claim.marker()
            if marker is None:
                return None
            if self._revision is None or self._revision.number != marker.revision:
                self._revision = self._read(marker.revision)
            return self._revision

    def _read(self, number: int) -> Revision:
        text = self._claim.tree(number).with_name("manifest").read_bytes()
        sha256, packed = hashlib.sha256(text).hexdigest(), zlib.compress(text, 1)
        return Revision(number, sha256, parse(text.decode()).entries, packed)

    def select(self, sha256: str, ranges: Sequence[tuple[int, int]]) -> "Selection":
        """The files of these ranges of the manifest's entries, ends included.

        Raises NotThereError if the manifest has changed or has fewer entries.
        """
        revision = self.newest()
        if revision is None or revision.sha256 != sha256:
            raise NotThereError(f"The pod no longer serves the workspace with manifest {sha256}.")
        entries = revision.entries
        if not all(0 <= first <= last < len(entries) for first, last in ranges):
            raise NotThereError(f"The request exceeds the {len(entries)} entries of the manifest.")
        selected = [entry for first, last in ranges for entry in entries[first : last + 1]]
        return Selection(
            self._claim.tree(revision.number), [e for e in selected if e.mode != "dir"]
        )


class Selection(NamedTuple):
    """Files of a tree, one after the other."""

    tree: Path
    files: list[Entry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def blocks(self) -> Iterator[bytes]:
        """The content in blocks of a mebibyte, with many small files in one. Raises OSError."""
        block = bytearray()
        for entry in self.files:
            with (self.tree / entry.path).open("rb", buffering=0) as file:
                while piece := file.read(_BLOCK - len(block)):
                    block += piece
                    if len(block) == _BLOCK:
                        yield bytes(block)
                        block.clear()
        if block:
            yield bytes(block)
