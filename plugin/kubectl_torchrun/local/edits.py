"""Edits of the directory: each makes a new revision of the code."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload import tree

# The pause between two scans: at least this, and four times the duration of a scan.
_SCAN_SECONDS = 0.3
_SCAN_SHARE = 4


async def watch(directory: Path, edited: Callable[[], None]) -> None:
    """Call `edited` after each edit of a file that an upload would contain, until cancelled."""
    known = await anyio.to_thread.run_sync(fingerprint, directory)
    seen = known
    while True:
        started = anyio.current_time()
        before, seen = seen, await anyio.to_thread.run_sync(fingerprint, directory)
        # Only after two equal scans: an editor may still be writing.
        if seen == before != known and seen:
            known = seen
            edited()
        duration = anyio.current_time() - started
        await anyio.sleep(max(_SCAN_SECONDS, _SCAN_SHARE * duration))


def fingerprint(directory: Path) -> str:
    """Return a digest of names, sizes and times of the files; "" while they cannot be read."""
    digest = hashlib.sha256()
    try:
        files = tree.scan(directory).files
    except (UsageProblem, OSError):
        return ""
    for file in files:
        with suppress(OSError):
            stat = os.stat(file.source)
            digest.update(
                f"{file.path}\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\0".encode()
            )
    return digest.hexdigest()
