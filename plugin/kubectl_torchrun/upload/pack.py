"""Files of a workspace as one zip archive: the same files give the same bytes and digest."""

import hashlib
import os
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BufferedRandom
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.text import human
from kubectl_torchrun.upload.cache import Workspace
from kubectl_torchrun.upload.tree import MOST_COPIES, TORCHRUNIGNORE, Tree, unreadable
from torchrun_api.contract.contents import Entry

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip archive
_BLOCK = 1 << 20
_SAMPLE = 1 << 16


class UploadLimits(NamedTuple):
    """The limits of the sync pod, checked here before an upload.

    files: including directories; size: bytes of all files; path, name: bytes of a path and of one
    component; ratio: bytes of files for each byte of the archive, above ratio_floor bytes.
    """

    files: int = MOST_COPIES
    size: int = 50 << 30
    path: int = 3840
    name: int = 255
    depth: int = 100
    ratio: int = 200
    ratio_floor: int = 1 << 30


LIMITS = UploadLimits()


class Archive(NamedTuple):
    """Packed files. `file` may be at any position; the caller closes it."""

    file: BufferedRandom
    sha256: str
    size: int
    files: int
    unpacked: int


def check(tree: Tree, limits: UploadLimits = LIMITS) -> None:
    """Raises UsageProblem if the workspace is empty, exceeds a limit or has names to rename."""
    if not tree.files:
        raise UsageProblem(
            f"There is nothing to upload in {tree.root}: it is empty, or all its files are ignored."
        )
    if len(tree.files) + len(tree.empty_directories) > limits.files:
        raise UsageProblem(
            f"{tree.root} has {len(tree.files):,} files; the limit is {limits.files:,}.\n"
            + _largest({_top(file.path): 0 for file in tree.files}, tree, count=True)
            + f"Add files that the run does not need to {TORCHRUNIGNORE}."
        )
    if tree.size > limits.size:
        raise UsageProblem(
            f"{tree.root} has {human(tree.size)}; the limit is {human(limits.size)}.\n"
            + _largest({_top(file.path): 0 for file in tree.files}, tree, count=False)
            + f"Add files that the run does not need to {TORCHRUNIGNORE}. Store data in a PVC under"
            " volumes.datasets."
        )
    paths = (*(file.path for file in tree.files), *tree.empty_directories)
    for path in paths:
        _check_path(path, limits)
    _check_collisions(paths)


def write(
    workspace: Workspace,
    entries: Sequence[int],
    file: BufferedRandom,
    advance: Callable[[int], None] = lambda _: None,
    limits: UploadLimits = LIMITS,
) -> Archive:
    """Pack files into `file`, an empty binary file. `advance` gets the bytes of each block.

    entries: indexes of entries of the manifest. Raises UsageProblem if a file cannot be read or has
    changed since the manifest was written, or if the sync pod would reject the archive as a
    decompression bomb. OSError: `file` cannot be written.
    """
    sources = {member.path: member.source for member in workspace.tree.files}
    unpacked = 0
    with zipfile.ZipFile(file, "w", strict_timestamps=False) as archive:
        for index in entries:
            entry = workspace.manifest.entries[index]
            source = sources[entry.path]
            unpacked += entry.size
            if _add(archive, entry, source, advance) != entry.sha256:
                raise UsageProblem(
                    f"{source} changed during the upload. Try again, or add it to {TORCHRUNIGNORE}"
                    " if a program writes to it."
                )
    size = file.tell()
    if unpacked > limits.ratio_floor and unpacked > size * limits.ratio:
        raise UsageProblem(
            f"{human(unpacked)} were compressed to {human(size)}. The sync pod rejects a workspace"
            f" that is nearly all zeros. Add the empty data to {TORCHRUNIGNORE}."
        )
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Archive(file, digest, size, len(entries), unpacked)


def _add(
    archive: zipfile.ZipFile, entry: Entry, place: Path, advance: Callable[[int], None]
) -> str:
    """Add one file; the digest of its content, of the first part if it has grown."""
    info = _info(entry.path, 0o100755 if entry.mode == "755" else 0o100644)
    info.file_size = entry.size  # selects the zip64 format above 4 GiB
    digest = hashlib.sha256()
    blocks = _blocks(place, entry.size)
    first = next(blocks, b"")
    if _is_worth_compressing(first[:_SAMPLE]):
        info.compress_type = zipfile.ZIP_DEFLATED
    with archive.open(info, "w") as target:
        for block in chain([first], blocks):
            digest.update(block)
            target.write(block)
            advance(len(block))
    return digest.hexdigest()


def _blocks(place: Path, size: int) -> Iterator[bytes]:
    """The content of a file. If it has grown beyond `size`, it ends at most a block later.

    A longer content may not fit in the zip format that `size` has selected. Raises UsageProblem.
    """
    done = 0
    try:
        with place.open("rb") as source:
            while done <= size and (block := source.read(_BLOCK)):
                yield block
                done += len(block)
    except FileNotFoundError:  # it has other content than the manifest
        return
    except OSError as error:
        raise unreadable(place, error) from None


def _is_worth_compressing(sample: bytes) -> bool:
    """Whether deflate saves space, which it does not for weights, images and archives."""
    return len(zlib.compress(sample, 1)) < 0.9 * len(sample)


def _info(path: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, _EPOCH)
    info.create_system = 3  # Unix: the mode below counts
    info.external_attr = mode << 16
    return info


def _check_path(path: str, limits: UploadLimits) -> None:
    name = os.fsencode(path).decode(errors="backslashreplace")
    encoded = os.fsencode(path)
    problem = ""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in path):
        problem = "contains control characters, or is not UTF-8"
    elif "\\" in path:
        problem = "contains a backslash"
    elif len(encoded) > limits.path or max(map(len, encoded.split(b"/"))) > limits.name:
        problem = (
            f"is longer than {limits.path} bytes, or has a component longer than {limits.name}"
        )
    elif path.count("/") >= limits.depth:
        problem = f"has more than {limits.depth} directories"
    if problem:
        raise UsageProblem(
            f"The path {name!r} {problem}. Rename it, or add it to {TORCHRUNIGNORE}."
        )


def _check_collisions(paths: Sequence[str]) -> None:
    """Raises UsageProblem for two paths that a PVC which ignores case (SMB) does not distinguish.

    The sync pod refuses them for every PVC.
    """
    places = set(paths)
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent and parent not in places:
            places.add(parent)
            parent = parent.rpartition("/")[0]
    known: dict[str, str] = {}
    for place in sorted(places):
        other = known.setdefault(unicodedata.normalize("NFC", place).casefold(), place)
        if other != place:
            raise UsageProblem(
                f"The paths {other!r} and {place!r} differ only in case or in the encoding of"
                f" accents. Rename one of them, or add it to {TORCHRUNIGNORE}."
            )


def _top(path: str) -> str:
    return path.partition("/")[0]


def _largest(totals: dict[str, int], tree: Tree, *, count: bool) -> str:
    for file in tree.files:
        totals[_top(file.path)] += 1 if count else file.size
    ranked = sorted(totals.items(), key=lambda item: -item[1])[:5]
    return "".join(
        f"  {name}: {f'{total:,} files' if count else human(total)}\n" for name, total in ranked
    )
