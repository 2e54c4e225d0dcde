"""Updates a running pod with the client's directory; only missing files are sent.

The client sends a manifest, with a line for each file and empty directory (in the format of the
plugin). The pod answers with the numbers of the lines whose contents it needs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchrun_sdk.spec import CALLS, FOLDER, RESULTS

_BLOCK = 1 << 20
_SECOND = 10**9


class ManifestLine(NamedTuple):
    """A line of a manifest: a file, or an empty directory (mode `dir`, sha256 `-`)."""

    path: str
    sha256: str
    size: int
    mode: str


def parse(text: str) -> list[ManifestLine]:
    """The lines of a manifest. Raises ValueError, also for a path outside the workspace."""
    lines = []
    for line in text.split("\n"):
        if line:
            sha256, size, mode, path = line.split(" ", 3)
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"the manifest names {path!r}")
            lines.append(ManifestLine(path, sha256, int(size), mode))
    return lines


class Receiver:
    """Updates a workspace. root: of the workspace; its FOLDER is not changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        folder = root / FOLDER / CALLS
        self._contents = folder / "held"
        self._digests = folder / "digests"
        self._lines: list[ManifestLine] = []
        # Of each unfinished file: its digest so far, and where it is written.
        self._open: dict[int, tuple[hashlib._Hash, Path]] = {}

    def wants(self, packed: str) -> list[int]:
        """The numbers of the lines whose contents are missing. Raises OSError, ValueError.

        The other files get their modes. Removes files that were deleted from the directory, but not
        files that the run wrote.
        """
        text = zlib.decompress(base64.b64decode(packed)).decode()
        self._lines = parse(text)
        # First, because a file may take the place of a directory, and a directory that of a file.
        for path in self._before() - {line.path for line in self._lines}:
            if path.split("/", 1)[0] != FOLDER:
                self._remove(path)
        digests = self._read_digests()
        fresh = {}
        missing = []
        for number, line in enumerate(self._lines):
            place = self._root / line.path
            if place.is_dir() != (line.mode == "dir"):
                self._remove(line.path)
            if line.mode == "dir":
                place.mkdir(parents=True, exist_ok=True)
                continue
            stamp = _stamp(place)
            before = digests.get(line.path)
            digest = before[3] if before and before[:3] == stamp else _digest(place, line, stamp)
            if digest != line.sha256 or not _set_mode(place, _mode(line)):
                missing.append(number)
            elif stamp is not None:
                fresh[line.path] = [*stamp, digest]
        self._digests.write_text(json.dumps(fresh), encoding="utf-8")
        return missing

    def content(self, number: int, data: str, *, more: bool) -> None:
        """Add a piece of a file in base64; the last piece replaces the file.

        Raises OSError, and ValueError if the content differs from the manifest.
        """
        line = self._lines[number]
        place = self._root / line.path
        if number not in self._open:
            place.parent.mkdir(parents=True, exist_ok=True)
            # A name that is neither too long nor that of another file of the workspace.
            descriptor, name = tempfile.mkstemp(prefix=".torchrun-", dir=place.parent)
            os.close(descriptor)
            self._open[number] = hashlib.sha256(), Path(name)
        digest, new = self._open[number]
        piece = base64.b64decode(data)
        digest.update(piece)
        with new.open("ab") as file:
            file.write(piece)
        if more:
            return
        del self._open[number]
        if digest.hexdigest() != line.sha256:
            new.unlink()
            raise ValueError(f"{line.path} was changed while it was sent; call again")
        _put(new, place, _mode(line))

    def finish(self) -> None:
        """Record the paths of this delivery for the next one."""
        listed = sorted({line.path for line in self._lines})
        self._contents.write_text("\n".join(listed), encoding="utf-8")

    def _remove(self, path: str) -> None:
        """Remove a file or an empty directory, and directories that become empty."""
        with suppress(OSError):
            place = self._root / path
            place.rmdir() if place.is_dir() else place.unlink()
            while path := os.path.dirname(path):
                (self._root / path).rmdir()

    def _before(self) -> set[str]:
        """The paths of the last delivery of the directory."""
        with suppress(OSError):
            return set(self._contents.read_text(encoding="utf-8").split("\n"))
        # The first time: from the PVC, if the workspace has one.
        source = Path(os.environ.get("TORCHRUN_WORKSPACE_SOURCE") or os.devnull)
        with suppress(OSError, ValueError, KeyError):
            number = json.loads((source / ".sync_success").read_text(encoding="utf-8"))["revision"]
            manifest = source / "revisions" / str(number) / "manifest"
            return {line.path for line in parse(manifest.read_text(encoding="utf-8"))}
        return self._older()

    def _older(self) -> set[str]:
        """The files older than the first call, where no record of the delivery exists."""
        folder = self._root / FOLDER
        starts = [path.stat().st_mtime_ns for path in (folder / RESULTS).glob("*/*.started")]
        paths = set()
        for top, folders, files in os.walk(self._root):
            if Path(top) == self._root:
                folders[:] = [name for name in folders if name != FOLDER]
            for path in (Path(top, name) for name in files):
                with suppress(OSError):
                    if not starts or path.stat().st_mtime_ns < min(starts):
                        paths.add(path.relative_to(self._root).as_posix())
        return paths

    def _read_digests(self) -> dict[str, list[object]]:
        try:
            digests: dict[str, list[object]] = json.loads(self._digests.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return digests


def _stamp(place: Path) -> list[object] | None:
    try:
        status = place.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _digest(place: Path, line: ManifestLine, stamp: list[object] | None) -> str:
    """The digest of a file with the expected size, "" for another size."""
    if stamp is None or stamp[0] != line.size:
        return ""
    digest = hashlib.sha256()
    with place.open("rb") as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def _mode(line: ManifestLine) -> int:
    """The permission bits of a file, which a later delivery replaces."""
    return int(line.mode, 8) | stat.S_IWUSR


def _set_mode(place: Path, mode: int) -> bool:
    """Whether the file has this mode now. That of another user cannot be changed."""
    if stat.S_IMODE(place.stat().st_mode) != mode:
        try:
            place.chmod(mode)
        except PermissionError:
            return False
    return True


def _put(new: Path, place: Path, mode: int) -> None:
    """Replace the file with a newer time, because bytecode has times in whole seconds."""
    before = _stamp(place)
    new.chmod(mode)
    new.replace(place)
    if before is not None:
        after = place.stat().st_mtime_ns
        least = int(str(before[1])) // _SECOND * _SECOND + _SECOND
        if after < least:
            os.utime(place, ns=(least, least))
