"""A commit's files as git lists them, judged, and its links replaced by what they point to.

A workspace holds no links: workers copy files, and a link could lead anywhere by then. What a link
of the repository points to inside of the workspace takes its place; any other link is refused.
"""

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.paths import Path, components, refused
from torchrun_runtime.sync.settings import Limits
from torchrun_runtime.sync.tree import too_many

_LONGEST_TARGET = 4096  # PATH_MAX
_MOST_HOPS = 40  # as Linux resolves at most so many links of one path


@dataclass(frozen=True)
class Blob:
    """An object's name, its size in bytes, and whether the file is executable."""

    name: str
    size: int
    executable: bool = False


@dataclass
class Link:
    """A symbolic link; target is read from its blob."""

    blob: Blob
    target: str = ""


class Folder(dict[str, "Node"]):
    """What a directory holds, by name."""


Node = Blob | Link | Folder


class Repository:
    """The files of one commit, below one directory of it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._root = Folder()
        self._links: list[tuple[Path, Link]] = []
        self._entries = 0
        self.submodules: list[str] = []

    def add(self, record: bytes) -> None:
        """One record of `git ls-tree -r -l -z`. Raises ArchiveError."""
        facts, _, raw = record.partition(b"\t")
        try:
            mode, kind, name, size = facts.decode("ascii").split()
            path = raw.decode()
        except ValueError:
            shown = raw.decode(errors="backslashreplace")
            raise refused("UnsafeName", shown, "has a name that is not UTF-8") from None
        self._entries += 1
        if self._entries > self._limits.entries:
            raise too_many(self._limits)
        parts = components(path, self._limits)
        if path.endswith("/") or any(_is_git_dir(part) for part in parts):
            raise refused("UnsafeName", path, "has a name that git keeps for itself")
        if kind == "commit":
            self.submodules.append(path)
            return
        blob = Blob(name, int(size) if size.isdecimal() else 0, mode == "100755")
        if mode == "120000":
            link = Link(blob)
            self._links.append((parts, link))
            self._put(parts, link)
        elif mode in ("100644", "100755", "100664"):
            self._put(parts, blob)
        else:
            raise refused("UnsafeMember", path, f"is neither a file nor a link (mode {mode})")

    def _put(self, path: Path, node: Node) -> None:
        folder = self._root
        for part in path[:-1]:
            inner = folder.setdefault(part, Folder())
            if not isinstance(inner, Folder):
                raise refused("DuplicateMember", "/".join(path), "lies below a file")
            folder = inner
        if path[-1] in folder:
            raise refused("DuplicateMember", "/".join(path), "is in the repository twice")
        folder[path[-1]] = node

    def read_links(self, read: Callable[[Blob], bytes]) -> None:
        """Learn where the links point. Raises ArchiveError."""
        for path, link in self._links:
            if link.blob.size > _LONGEST_TARGET:
                raise refused("UnsafeMember", "/".join(path), "is a link with an endless target")
            try:
                link.target = read(link.blob).decode()
            except UnicodeDecodeError:
                target = "is a link whose target is not UTF-8"
                raise refused("UnsafeMember", "/".join(path), target) from None

    def files(self) -> Iterator[tuple[Path, Blob]]:
        """Every file at its place, and at those of links to it. Raises ArchiveError."""
        for made, (path, blob) in enumerate(self._flat((), self._root, (), 0)):
            if made >= self._limits.entries:
                raise too_many(self._limits)
            yield path, blob

    def _flat(self, out: Path, node: Node, real: Path, hops: int) -> Iterator[tuple[Path, Blob]]:
        """`node`, which is at `real`, as it shall appear at `out`."""
        if isinstance(node, Blob):
            components("/".join(out), self._limits)
            yield out, node
        elif isinstance(node, Link):
            if hops >= _MOST_HOPS:
                raise refused("UnsafeMember", "/".join(out), "is a link that leads to itself")
            found = self._follow(real[:-1], node.target, "/".join(real), hops + 1)
            yield from self._flat(out, self._at(found), found, hops + 1)
        else:
            for name, child in node.items():
                yield from self._flat((*out, name), child, (*real, name), hops)

    def _follow(self, start: Path, target: str, name: str, hops: int) -> Path:
        """Where a target leads from a real directory. Raises ArchiveError where that is outside."""
        if target.startswith("/") or hops > _MOST_HOPS:
            raise self._leaves(name, target)
        current = start
        for part in target.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                if not current:
                    raise self._leaves(name, target)
                current = current[:-1]
                continue
            current = (*current, part)
            node = self._at(current, name, target)
            if isinstance(node, Link):
                current = self._follow(current[:-1], node.target, name, hops + 1)
        return current

    def _at(self, path: Path, name: str = "", target: str = "") -> Node:
        node: Node = self._root
        for part in path:
            inner = node.get(part) if isinstance(node, Folder) else None
            if inner is None:
                raise self._leaves(name or "/".join(path), target)
            node = inner
        return node

    def _leaves(self, name: str, target: str) -> ArchiveError:
        return refused(
            "UnsafeMember",
            name,
            f"is a symbolic link to {target[:120]!a}, which is not in the workspace;"
            " put a copy in its place, or choose a subPath that holds both",
        )


def _is_git_dir(part: str) -> bool:
    """.git, also as the file systems of Windows and macOS would read it."""
    bare = "".join(c for c in part if unicodedata.category(c) != "Cf")
    return bare.casefold().rstrip(" .") in (".git", "git~1")
