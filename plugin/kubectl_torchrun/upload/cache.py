"""The upload cache: digests of files, and the last upload of a directory.

A lost or wrong cache only costs time, because the sync pod checks every digest.
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
from kubectl_torchrun.home import home
from kubectl_torchrun.upload.tree import File, Tree, unreadable
from torchrun_api.contract.contents import Entry, Manifest, ManifestError, parse

# Nanoseconds. A younger file may change again within the resolution of its time stamp.
_STABLE_AGE = 2 * 10**9
_BLOCK = 1 << 20

# Of one file: size, mtime_ns, ctime_ns, inode, sha256. A build may set the mtime.
CachedDigest = tuple[int, int, int, int, str]


class LastUpload(NamedTuple):
    """The last job that got a directory, and the manifest of the upload."""

    job: str
    manifest: Manifest


class Workspace(NamedTuple):
    """A directory to upload. previous: its last upload, None without one."""

    tree: Tree
    manifest: Manifest
    previous: LastUpload | None = None


class UploadCache:
    """The cache of one directory and one namespace of a cluster; created when first written."""

    def __init__(self, namespace: ClusterNamespace, directory: Path) -> None:
        here = str(directory.resolve())
        key = "\0".join([*namespace, here])
        self._upload_file = state_folder() / f"sent-{_short(key)}"
        self._digests = state_of("digests", directory)

    def digest(self, tree: Tree, advance: Callable[[int], None] = lambda _: None) -> Workspace:
        """The workspace with digests of all files. `advance` is called with the bytes of each file.

        Raises UsageProblem if a file cannot be read.
        """
        cached = self._read_digests()
        fresh: dict[str, CachedDigest] = {}
        stable_since = time.time_ns() - _STABLE_AGE
        entries = [Entry(path, "", 0, "dir") for path in tree.empty_directories]
        for file in tree.files:
            size, sha256, status = _digest(file, cached.get(file.path))
            if max(status.st_mtime_ns, status.st_ctime_ns) < stable_since:
                fresh[file.path] = (*_stamp(status), sha256)
            entries.append(Entry(file.path, sha256, size, "755" if file.executable else "644"))
            advance(size)
        if fresh != cached:
            write(self._digests, msgspec.msgpack.encode(fresh))
        return Workspace(tree, Manifest(entries), self.last_upload())

    def last_upload(self) -> LastUpload | None:
        """The last upload of the directory; None if there is none in the cache."""
        try:
            job, _, text = zlib.decompress(self._upload_file.read_bytes()).decode().partition("\n")
            return LastUpload(job, parse(text))
        except (OSError, zlib.error, UnicodeDecodeError, ManifestError):
            return None

    def record(self, upload: LastUpload) -> None:
        """Save the upload for the next command."""
        write(self._upload_file, zlib.compress(f"{upload.job}\n{upload.manifest.text}".encode(), 1))

    def _read_digests(self) -> dict[str, CachedDigest]:
        try:
            return msgspec.msgpack.decode(self._digests.read_bytes(), type=dict[str, CachedDigest])
        except (OSError, msgspec.DecodeError):
            return {}


def _digest(file: File, cached: CachedDigest | None) -> tuple[int, str, os.stat_result]:
    try:
        with file.source.open("rb", buffering=0) as content:
            status = os.fstat(content.fileno())
            if cached and cached[:-1] == _stamp(status):
                return cached[0], cached[-1], status
            digest, size = hashlib.sha256(), 0
            while block := content.read(_BLOCK):
                digest.update(block)
                size += len(block)
            return size, digest.hexdigest(), status
    except OSError as error:
        raise unreadable(file.source, error) from None


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def state_folder() -> Path:
    """The plugin's folder for this user's state."""
    state = os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state"
    return Path(state) / "kubectl-torchrun"


def state_of(kind: str, directory: Path) -> Path:
    """The file of this kind of state for a directory. It may not exist."""
    return state_folder() / f"{kind}-{_short(str(directory.resolve()))}"


def _short(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:24]


def write(path: Path, content: bytes) -> None:
    """Write a file of the state atomically; an error is ignored, because it is optional."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
