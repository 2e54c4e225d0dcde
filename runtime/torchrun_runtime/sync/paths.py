"""The valid paths of a workspace, for all sources, checked before a byte is written.

No name is repaired. An invalid name is refused, with the name in the message: tools repair names in
different ways, and a silently renamed file breaks a training.
"""

import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.settings import ArchiveLimits

_LONGEST_NAME = 255  # NAME_MAX, bytes
_SHOWN_NAME = 120  # characters of a name that a message shows

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)  # there are up to 200,000
class PlannedPath:
    """A file or directory to create. path: components; size: announced bytes, an upper bound."""

    path: Path
    directory: bool = False
    executable: bool = False
    size: int = 0

    @property
    def name(self) -> str:
        """The path for messages."""
        return display_name("/".join(self.path))


def display_name(name: str) -> str:
    """Return a name for messages and logs: quoted, escaped, shortened."""
    cut = name if len(name) <= _SHOWN_NAME else name[:_SHOWN_NAME] + "..."
    return ascii(cut) if not cut.isprintable() else repr(cut)


def refused(reason: str, name: str, why: str) -> ArchiveError:
    """The error of one entry. why: the end of the sentence, without a full stop."""
    return ArchiveError(reason, f"Entry {display_name(name)} {why}.")


def components(name: str, limits: ArchiveLimits) -> Path:
    """The components of a relative path; one slash at the end is allowed. Raises ArchiveError."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise refused("InvalidFile", name, "has a control character in its name")
    if "\\" in name:
        raise refused(
            "InvalidFile", name, "has a backslash in its name. Separate directories by '/'"
        )
    if name.startswith("/"):
        raise refused("InvalidFile", name, "has an absolute path. Use a relative path")
    if len(name.encode()) > limits.path:
        raise refused("InvalidFile", name, f"has a path of more than {limits.path} bytes")
    # Interned, because many files have the same directories.
    path = tuple(map(sys.intern, name.removesuffix("/").split("/")))
    if len(path) > limits.depth:
        raise refused("InvalidFile", name, f"is more than {limits.depth} levels deep")
    for part in path:
        if part in ("", ".", ".."):
            raise refused(
                "InvalidFile", name, f"has the component {part!r} in its path, which is not allowed"
            )
        if len(part.encode()) > _LONGEST_NAME:
            raise refused(
                "InvalidFile", name, f"has a component of more than {_LONGEST_NAME} bytes"
            )
    return path


def refuse_collisions(places: Sequence[PlannedPath]) -> None:
    """Raises ArchiveError if two places have the same path, or differ only in case.

    A PVC may ignore case (SMB), and so may the machine of the user.
    """
    files: set[Path] = set()
    directories: set[Path] = set()
    for place in places:
        if place.path in files or (place.directory and place.path in directories):
            raise refused("InvalidFile", "/".join(place.path), "is in the archive twice")
        (directories if place.directory else files).add(place.path)
    parents = {place.path[:depth] for place in places for depth in range(1, len(place.path))}
    for path in files:
        if path in parents or path in directories:
            raise refused(
                "InvalidFile", "/".join(path), "is both a file and a directory in the archive"
            )
    _refuse_folded(files | directories | parents)


def _refuse_folded(paths: set[Path]) -> None:
    cached: dict[Path, Path] = {}
    for path in sorted(paths):
        folded = tuple(unicodedata.normalize("NFC", part).casefold() for part in path)
        # Most paths are folded already, and need no second tuple.
        other = cached.setdefault(path if folded == path else folded, path)
        if other != path:
            raise refused(
                "InvalidFile",
                "/".join(path),
                f"differs from {display_name('/'.join(other))} only in case or in the encoding of"
                " accents. Rename one of them",
            )
