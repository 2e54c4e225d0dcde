"""Files of a workspace as one zip archive: the same files give the same bytes and digest."""

import hashlib
import os
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import NamedTuple

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.text import human
from kubectl_torchrun.upload.cache import Workspace
from kubectl_torchrun.upload.tree import MOST_COPIES, TORCHRUNIGNORE, Tree
from torchrun_api.contents import Entry

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip archive can name
_BLOCK = 1 << 20
_SAMPLE = 1 << 16


class Limits(NamedTuple):
    """The sync pod's limits: a workspace beyond them is refused here, before an upload.

    files: with directories; size: bytes of all files; path, name: bytes of a whole path and of one
    part of it; ratio: bytes of files for each byte of the archive, above ratio_floor bytes.
    """

    files: int = MOST_COPIES
    size: int = 50 << 30
    path: int = 3840
    name: int = 255
    depth: int = 100
    ratio: int = 200
    ratio_floor: int = 1 << 30


LIMITS = Limits()


class Archive(NamedTuple):
    """Packed files: `file` is at any position and stays the caller's to close."""

    file: BufferedRandom
    sha256: str
    size: int
    files: int
    unpacked: int


def check(tree: Tree, limits: Limits = LIMITS) -> None:
    """Raises UsageProblem if the workspace is empty, or saying what is too large and what to do."""
    if not tree.files:
        raise UsageProblem(
            f"There is nothing to send in {tree.root}: it is empty, or all in it is ignored."
        )
    if len(tree.files) + len(tree.empty_directories) > limits.files:
        raise UsageProblem(
            f"{tree.root} holds {len(tree.files):,} files; a workspace may have {limits.files:,}.\n"
            + _largest({_top(file.path): 0 for file in tree.files}, tree, count=True)
            + f"Name what the run does not need in {TORCHRUNIGNORE}."
        )
    if tree.size > limits.size:
        raise UsageProblem(
            f"{tree.root} holds {human(tree.size)}; a workspace may have {human(limits.size)}.\n"
            + _largest({_top(file.path): 0 for file in tree.files}, tree, count=False)
            + f"Name what the run does not need in {TORCHRUNIGNORE}; data belongs in a claim that"
            " the job names under volumes.datasets."
        )
    for path in (*(file.path for file in tree.files), *tree.empty_directories):
        _check_path(path, limits)


def write(
    workspace: Workspace,
    wanted: Sequence[int],
    file: BufferedRandom,
    advance: Callable[[int], None] = lambda _: None,
    limits: Limits = LIMITS,
) -> Archive:
    """Packs files into `file`, an empty binary file. `advance` gets the bytes of each block.

    wanted: numbers of entries of the manifest. Raises UsageProblem if a file cannot be read, or is
    changed since the manifest was written, or if the sync pod would take the archive for a
    decompression bomb.
    """
    sources = {member.path: member.source for member in workspace.tree.files}
    unpacked = 0
    with zipfile.ZipFile(file, "w", strict_timestamps=False) as archive:
        for number in wanted:
            entry = workspace.manifest.entries[number]
            source = sources[entry.path]
            unpacked += entry.size
            try:
                unchanged = _add(archive, entry, source, advance) == entry.sha256
            except FileNotFoundError:
                unchanged = False
            except PermissionError:
                raise UsageProblem(
                    f"{source} cannot be read."
                    f" Change its permissions, or name it in {TORCHRUNIGNORE}."
                ) from None
            if not unchanged:
                raise UsageProblem(f"{source} changed while it was packed. Try again.")
    size = file.tell()
    if unpacked > limits.ratio_floor and unpacked > size * limits.ratio:
        raise UsageProblem(
            f"{human(unpacked)} became {human(size)}: the workspace is nearly all zeros, which the"
            f" sync pod refuses. Name the empty data in {TORCHRUNIGNORE}."
        )
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Archive(file, digest, size, len(wanted), unpacked)


def _add(
    archive: zipfile.ZipFile, entry: Entry, place: Path, advance: Callable[[int], None]
) -> str:
    """Add one file; the digest of what was read."""
    info = _info(entry.path, 0o100755 if entry.mode == "755" else 0o100644)
    info.file_size = entry.size  # beyond 4 GiB this chooses the format that can hold it
    digest = hashlib.sha256()
    with place.open("rb") as source:
        block = source.read(_BLOCK)
        if _is_worth_compressing(block[:_SAMPLE]):
            info.compress_type = zipfile.ZIP_DEFLATED
        with archive.open(info, "w") as target:
            while block:
                digest.update(block)
                target.write(block)
                advance(len(block))
                block = source.read(_BLOCK)
    return digest.hexdigest()


def _is_worth_compressing(sample: bytes) -> bool:
    """Weights, images and archives are not: deflate would only cost time."""
    return len(zlib.compress(sample, 1)) < 0.9 * len(sample)


def _info(path: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, _EPOCH)
    info.create_system = 3  # Unix: the mode below counts
    info.external_attr = mode << 16
    return info


def _check_path(path: str, limits: Limits) -> None:
    shown = os.fsencode(path).decode(errors="backslashreplace")
    encoded = os.fsencode(path)
    what = ""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in path):
        what = "holds control characters, or is not UTF-8"
    elif "\\" in path:
        what = "holds a backslash"
    elif len(encoded) > limits.path or max(map(len, encoded.split(b"/"))) > limits.name:
        what = f"is longer than {limits.path} bytes, or a part of it than {limits.name}"
    elif path.count("/") >= limits.depth:
        what = f"is deeper than {limits.depth} directories"
    if what:
        raise UsageProblem(f"The name {shown!r} {what}. Rename it, or name it in {TORCHRUNIGNORE}.")


def _top(path: str) -> str:
    return path.partition("/")[0]


def _largest(totals: dict[str, int], tree: Tree, *, count: bool) -> str:
    for file in tree.files:
        totals[_top(file.path)] += 1 if count else file.size
    ranked = sorted(totals.items(), key=lambda item: -item[1])[:5]
    return "".join(
        f"  {name}: {f'{total:,} files' if count else human(total)}\n" for name, total in ranked
    )
