"""From a manifest to a tree: each file comes from content on the PVC or from the upload."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torchrun_api.contract.contents import Entry, Manifest
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.errors import FULL, ArchiveError, workspace_full
from torchrun_runtime.sync.paths import display_name
from torchrun_runtime.sync.settings import ArchiveLimits
from torchrun_runtime.sync.tree import give, make_directories

# A base is often on a network file system, where reads wait for round trips.
_THREADS = 16
_PIECE = 1 << 20

# Digest and mode of a file. Files with the same key can be one file on disk.
Content = tuple[str, str]


class Assembly:
    """Assembles one workspace. All its files are on this PVC and never change again.

    advance: called from several threads, after each file and each piece of one.
    """

    def __init__(
        self,
        claim: Claim,
        manifest: Manifest,
        limits: ArchiveLimits,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.manifest = manifest
        self._advance = advance
        self._claim = claim
        self._limits = limits
        self._available: dict[Content, Path] = {}
        self._packs = 0

    def reuse_own_files(self) -> None:
        """Reuse the files of the current revision, as hard links."""
        marker = self._claim.marker()
        if marker is None:
            return
        tree = self._claim.tree(marker.revision)
        contents = {_content(entry) for entry in self.manifest.entries}
        for entry in self._claim.manifest(marker).entries:
            if _content(entry) in contents and entry.sha256:
                with suppress(OSError):
                    if (path := tree / entry.path).stat().st_size == entry.size:
                        self._available[_content(entry)] = path
                self._advance()

    def copy_from_base(self, base: Claim) -> int:
        """Copy missing files from another PVC if their digests match; the number of bytes."""
        found = base.base()
        if found is None:
            return 0
        tree, manifest = found
        missing = {_content(self.manifest.entries[index]) for index in self.missing()}
        present = {_content(e): e for e in manifest.entries if _content(e) in missing}
        directory = self._claim.work / "base"
        directory.mkdir(parents=True, exist_ok=True)

        def copy(entry: Entry) -> int:
            target = directory / f"{entry.sha256}-{entry.mode}"
            if not _copy_checked(tree / entry.path, target, entry, self._advance):
                return 0
            self._available[_content(entry)] = target
            return entry.size

        with ThreadPoolExecutor(_THREADS) as pool:
            return sum(pool.map(copy, present.values()))

    def add_archive(self, archive: Path) -> None:
        """Add the contents of an archive of files of this workspace.

        Raises as `extract`, and ArchiveError if a member differs from the manifest.
        """
        self._packs += 1
        self._claim.work.mkdir(parents=True, exist_ok=True)
        directory = self._claim.work / str(self._packs)
        extracted = extract(archive, directory, self._limits, self._advance)
        announced = {entry.path: entry for entry in self.manifest.entries}
        for entry in extracted.entries:
            if announced.get(entry.path) != entry:
                message = (
                    f"Entry {display_name(entry.path)} differs from the manifest. The file may have"
                    " changed during the upload. Retry."
                )
                raise ArchiveError("WrongArchive", message)
            if entry.sha256:
                self._available[_content(entry)] = directory / entry.path

    def missing(self) -> list[int]:
        """Numbers of the entries to upload; each content once."""
        listed: set[Content] = set()
        numbers = []
        for number, entry in enumerate(self.manifest.entries):
            content = _content(entry)
            if entry.sha256 and content not in self._available and content not in listed:
                listed.add(content)
                numbers.append(number)
        return numbers

    def build(self) -> None:
        """Create the new tree. No content may be missing.

        Raises OSError, SyncError (WorkspaceFull).
        """
        tree = self._claim.new
        tree.mkdir(mode=0o755)
        directories: set[tuple[str, ...]] = {()}
        try:
            for entry in self.manifest.entries:
                parts = tuple(entry.path.split("/"))
                make_directories(tree, parts if entry.mode == "dir" else parts[:-1], directories)
                if entry.sha256:
                    source, target = self._available[_content(entry)], tree / entry.path
                    _link(source, target, _mode(entry), self._advance)
                self._advance()
        except OSError as error:
            if error.errno in FULL:
                raise workspace_full(error.strerror or "no space") from error
            raise


def ranges(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as [first, last] pairs, ends included."""
    return [list(pair) for pair in _ranges(numbers)]


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    if not numbers:
        return
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _content(entry: Entry) -> Content:
    return entry.sha256, entry.mode


def _mode(entry: Entry) -> int:
    return 0o755 if entry.mode == "755" else 0o644


def _link(source: Path, target: Path, mode: int, advance: Callable[[], None]) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in FULL:
            raise
        # Some file systems have no links; others limit their number for one file.
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as writer, source.open("rb") as reader:
            give(descriptor, mode)
            while piece := reader.read(_PIECE):
                writer.write(piece)
                advance()


def _copy_checked(source: Path, target: Path, entry: Entry, advance: Callable[[], None]) -> bool:
    """Copy a file if its content still matches the digest; False at any error of the base."""
    digest = hashlib.sha256()
    try:
        with source.open("rb", buffering=0) as reader:
            if os.fstat(reader.fileno()).st_size != entry.size:
                return False
            with target.open("wb", buffering=0) as writer:
                while piece := reader.read(_PIECE):
                    digest.update(piece)
                    view = memoryview(piece)
                    while view:
                        view = view[writer.write(view) or 0 :]
                    advance()
    except OSError:
        target.unlink(missing_ok=True)
        return False
    if digest.hexdigest() != entry.sha256:
        target.unlink()
        return False
    give(target, _mode(entry))
    return True
