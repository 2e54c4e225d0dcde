"""The files of the newest revision, for requests of workers."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchrun_api.contents import Entry, Manifest
from torchrun_runtime.sync.claim import Claim

_BLOCK = 1 << 20


class NotThereError(Exception):
    """The request is for another workspace than the served one."""


class Revision(NamedTuple):
    """One revision. packed: the compressed text of its manifest."""

    number: int
    manifest: Manifest
    packed: bytes


class Tree:
    """The workspace of a directory that torchrun-sync writes. Its methods block."""

    def __init__(self, directory: Path) -> None:
        self._claim = Claim(directory)
        self._revision: Revision | None = None

    def ready(self) -> bool:
        """Whether there is a complete workspace."""
        return self._claim.marker() is not None

    def newest(self) -> Revision | None:
        """The revision of the marker; None without a marker."""
        marker = self._claim.marker()
        if marker is None:
            return None
        if self._revision is None or self._revision.number != marker.revision:
            manifest = self._claim.manifest(marker)
            packed = zlib.compress(manifest.text.encode(), 1)
            self._revision = Revision(marker.revision, manifest, packed)
        return self._revision

    def select(self, sha256: str, ranges: Sequence[tuple[int, int]]) -> "Selection":
        """The files of these ranges of the manifest's entries, ends included.

        Raises NotThereError if the manifest has changed or has fewer entries.
        """
        revision = self.newest()
        if revision is None or revision.manifest.sha256 != sha256:
            raise NotThereError(f"The pod no longer serves the workspace with manifest {sha256}.")
        entries = revision.manifest.entries
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
