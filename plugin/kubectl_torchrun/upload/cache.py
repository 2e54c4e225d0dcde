"""The upload cache: digests of files, and what was sent from a directory last.

A cache that is lost or wrong costs time and nothing else: the sync pod checks every digest.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubectl_torchrun.cluster.kubectl import ClusterNamespace
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload.tree import TORCHRUNIGNORE, File, Tree
from torchrun_api.contents import Entry, Manifest, ManifestError, parse

# A younger file may change again within the resolution of its time stamp.
_SETTLED = 2 * 10**9
_BLOCK = 1 << 20

# Of one file: size, mtime_ns, inode, sha256.
Known = tuple[int, int, int, str]


class LastUpload(NamedTuple):
    """The job to which a directory was sent last, and the manifest of what was sent."""

    job: str
    manifest: Manifest


class Workspace(NamedTuple):
    """A directory to send. previous: what was sent from it last, None for nothing."""

    tree: Tree
    manifest: Manifest
    previous: LastUpload | None = None


class UploadCache:
    """The cache of one directory and one namespace of a cluster; created when first written."""

    def __init__(self, namespace: ClusterNamespace, directory: Path) -> None:
        here = str(directory.resolve())
        key = "\0".join([*namespace, here])
        self._sent = state_folder() / f"sent-{_short(key)}"
        self._digests = state_folder() / f"digests-{_short(here)}"

    def digest(self, tree: Tree, advance: Callable[[int], None] = lambda _: None) -> Workspace:
        """The directory's files by their digests. `advance` gets the bytes of each file.

        Raises UsageProblem where a file cannot be read.
        """
        known = self._known()
        fresh: dict[str, Known] = {}
        settled = time.time_ns() - _SETTLED
        entries = [Entry(path, "", 0, "dir") for path in tree.empty_directories]
        for file in tree.files:
            size, sha256, status = _digest(file, known.get(file.path))
            if status.st_mtime_ns < settled:
                fresh[file.path] = (size, status.st_mtime_ns, status.st_ino, sha256)
            entries.append(Entry(file.path, sha256, size, "755" if file.executable else "644"))
            advance(size)
        if fresh != known:
            _write(self._digests, msgspec.msgpack.encode(fresh))
        return Workspace(tree, Manifest(entries), self.last_upload())

    def last_upload(self) -> LastUpload | None:
        """What was sent from the directory last; None where nothing is recorded."""
        try:
            job, _, text = zlib.decompress(self._sent.read_bytes()).decode().partition("\n")
            return LastUpload(job, parse(text))
        except (OSError, zlib.error, UnicodeDecodeError, ManifestError):
            return None

    def record(self, upload: LastUpload) -> None:
        """Keep it for the next command."""
        _write(self._sent, zlib.compress(f"{upload.job}\n{upload.manifest.text}".encode(), 1))

    def _known(self) -> dict[str, Known]:
        try:
            return msgspec.msgpack.decode(self._digests.read_bytes(), type=dict[str, Known])
        except (OSError, msgspec.DecodeError):
            return {}


def _digest(file: File, known: Known | None) -> tuple[int, str, os.stat_result]:
    try:
        with file.source.open("rb", buffering=0) as opened:
            status = os.fstat(opened.fileno())
            stamp = (status.st_size, status.st_mtime_ns, status.st_ino)
            if known and known[:3] == stamp:
                return known[0], known[3], status
            digest, size = hashlib.sha256(), 0
            while block := opened.read(_BLOCK):
                digest.update(block)
                size += len(block)
            return size, digest.hexdigest(), status
    except FileNotFoundError:
        raise UsageProblem(f"{file.source} went away while it was read. Try again.") from None
    except PermissionError:
        raise UsageProblem(
            f"{file.source} cannot be read. Change its permissions, or name it in {TORCHRUNIGNORE}."
        ) from None


def state_folder() -> Path:
    """The plugin's folder for this user's state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kubectl-torchrun"


def _short(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:24]


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; a home that cannot be written is no reason to stop."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
