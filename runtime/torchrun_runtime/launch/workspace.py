"""From the claim that all workers share to a copy of the node's own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Iterator, NamedTuple

from .errors import LaunchError
from .output import say, wait_until

MARKER = ".sync_success"
# Claims are often network file systems, where copies wait for round trips.
_THREADS = 16
_BATCH = 16  # files; a task of its own for each of 200,000 would take much memory


class Copied(NamedTuple):
    """What was copied. bytes: sum of the files' sizes."""

    files: int
    bytes: int


def fetch(source: str, target: str, seconds: float) -> Copied:
    """Wait for the marker on the claim, then copy the tree of its revision into `target`.

    Raises LaunchError: WorkspaceNotReady where there is no marker after `seconds`,
    WorkspaceCopyFailed.
    """
    marker = os.path.join(source, MARKER)
    if not wait_until(lambda: os.path.exists(marker), seconds, f"the workspace ({marker})"):
        raise LaunchError(
            "WorkspaceNotReady",
            f"the workspace was not ready after {seconds:.0f} s: {marker} is missing; "
            "look at the job's sync pod, or raise TORCHRUN_SYNC_WAIT_SECONDS",
        )
    start = time.monotonic()
    try:
        revision = newest(source)
        copied = copy_tree(os.path.join(source, "revisions", str(revision), "tree"), target)
    except OSError as error:
        raise LaunchError(
            "WorkspaceCopyFailed", f"cannot copy the workspace to {target}: {error}"
        ) from error
    seconds = time.monotonic() - start
    say(f"workspace: {copied.files} files, {copied.bytes} bytes in {target} ({seconds:.1f} s)")
    return copied


def newest(source: str) -> int:
    """The revision that the marker names. Raises OSError, also where it names none."""
    with open(os.path.join(source, MARKER), encoding="utf-8") as file:
        text = file.read()
    try:
        return int(json.loads(text)["revision"])
    except (ValueError, KeyError, TypeError):
        raise OSError(f"{file.name} names no revision: {text[:200]}") from None


def copy_tree(source: str, target: str) -> Copied:
    """Copy regular files and directories with their permission bits; replace what is there.

    Raises OSError, also for anything that is neither: a synced workspace holds no links.
    """
    with ThreadPoolExecutor(_THREADS, initializer=_block_signals) as pool:
        done = list(pool.map(_copy_files, _batches(_files(source, target))))
    return Copied(sum(copied.files for copied in done), sum(copied.bytes for copied in done))


class _File(NamedTuple):
    source: str
    target: str
    mode: int


def _files(source: str, target: str) -> Iterator[_File]:
    """Every file below `source`; each directory is made before its first file comes."""
    os.makedirs(target, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            path = os.path.join(target, entry.name)
            if stat.S_ISDIR(status.st_mode):
                yield from _files(entry.path, path)
            elif stat.S_ISREG(status.st_mode):
                yield _File(entry.path, path, stat.S_IMODE(status.st_mode))
            else:
                raise OSError(f"{entry.path} is neither a file nor a directory")


def _block_signals() -> None:
    """Leave all signals to the main thread: a thread about to end would take one with it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _batches(files: Iterator[_File]) -> Iterator[list[_File]]:
    while batch := list(islice(files, _BATCH)):
        yield batch


def _copy_files(files: list[_File]) -> Copied:
    size = 0
    for file in files:
        shutil.copyfile(file.source, file.target)
        os.chmod(file.target, file.mode | stat.S_IWUSR)
        size += os.path.getsize(file.target)
    return Copied(len(files), size)
