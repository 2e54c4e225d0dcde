"""The files of a commit as git lists them, checked, with links replaced by their targets.

A workspace has no links: workers copy files, and a link could point to any file of their nodes. A
link is replaced by its target if that is inside the workspace; any other link is refused.
"""

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.paths import Path, components, refused
from torchrun_runtime.sync.settings import ArchiveLimits
from torchrun_runtime.sync.tree import too_many

_LONGEST_TARGET = 4096  # PATH_MAX
_MOST_HOPS = 40  # the most links of one path that Linux resolves


@dataclass(frozen=True)
class Blob:
    """An object's name, its size in bytes, and whether the file is executable."""

    name: str
    size: int
    executable: bool = False


@dataclass
class Link:
    """A symbolic link. target: the content of its blob."""

    blob: Blob
    target: str = ""


class Resolved(NamedTuple):
    """The target of a link, and the number of links on the path, including itself."""

    path: Path
    hops: int


class Folder(dict[str, "Node"]):
    """The entries of a directory by name."""


Node = Blob | Link | Folder


class Repository:
    """The files of one commit, below one directory of it."""

    def __init__(self, limits: ArchiveLimits) -> None:
        self._limits = limits
        self._root = Folder()
        self._links: list[tuple[Path, Link]] = []
        self._entries = 0
        self._resolved: dict[Path, Resolved] = {}
        self._resolving: list[Path] = []
        self.submodules: list[str] = []

    def add(self, record: bytes) -> None:
        """Add one record of `git ls-tree -r -l -z`. Raises ArchiveError."""
        facts, _, raw = record.partition(b"\t")
        try:
            mode, kind, name, size = facts.decode("ascii").split()
            path = raw.decode()
        except ValueError:
            readable_path = raw.decode(errors="backslashreplace")
            raise refused("InvalidFile", readable_path, "has a name that is not UTF-8") from None
        self._entries += 1
        if self._entries > self._limits.entries:
            raise too_many(self._limits)
        parts = components(path, self._limits)
        if path.endswith("/") or any(_is_git_dir(part) for part in parts):
            raise refused("InvalidFile", path, "has a name that is reserved for git")
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
            raise refused("InvalidFile", path, f"is neither a file nor a link (mode {mode})")

    def _put(self, path: Path, node: Node) -> None:
        folder = self._root
        for part in path[:-1]:
            inner = folder.setdefault(part, Folder())
            if not isinstance(inner, Folder):
                raise refused("InvalidFile", "/".join(path), "is below a file")
            folder = inner
        if path[-1] in folder:
            raise refused("InvalidFile", "/".join(path), "is in the repository twice")
        folder[path[-1]] = node

    def read_links(self, read: Callable[[Blob], bytes]) -> None:
        """Read the targets of the links. Raises ArchiveError."""
        for path, link in self._links:
            if link.blob.size > _LONGEST_TARGET:
                raise refused(
                    "InvalidFile",
                    "/".join(path),
                    f"is a link with a target of more than {_LONGEST_TARGET} bytes",
                )
            try:
                link.target = read(link.blob).decode()
            except UnicodeDecodeError:
                target = "is a link whose target is not UTF-8"
                raise refused("InvalidFile", "/".join(path), target) from None

    def files(self, check_time: Callable[[], None] = lambda: None) -> Iterator[tuple[Path, Blob]]:
        """Every file at its path, and at those of links to it. Raises ArchiveError.

        check_time: called for each file; raises after the deadline.
        """
        for count, (path, blob) in enumerate(self._flat((), self._root, (), 0)):
            check_time()
            if count >= self._limits.entries:
                raise too_many(self._limits)
            yield path, blob

    def _flat(self, out: Path, node: Node, real: Path, hops: int) -> Iterator[tuple[Path, Blob]]:
        """The files of `node`, whose path is `real`, below `out`. hops: number of links so far."""
        if isinstance(node, Blob):
            components("/".join(out), self._limits)
            yield out, node
        elif isinstance(node, Link):
            target = self._resolve(real, node)
            if hops + target.hops > _MOST_HOPS:
                raise _too_many_hops(out)
            yield from self._flat(out, self._at(target.path), target.path, hops + target.hops)
        else:
            if len(out) > self._limits.depth:
                components("/".join(out), self._limits)  # raises the error
            for name, child in node.items():
                yield from self._flat((*out, name), child, (*real, name), hops)

    def _resolve(self, at: Path, link: Link) -> Resolved:
        """Resolve a link and all other links on its path. Raises ArchiveError.

        Each link is resolved once, so that the time is linear in the lengths of the targets. The
        depth of nested links is at most `_MOST_HOPS`.
        """
        cached = self._resolved.get(at)
        if cached is not None:
            return cached
        if at in self._resolving or len(self._resolving) >= _MOST_HOPS:
            raise _too_many_hops(at)
        self._resolving.append(at)
        resolved = self._follow(at, link.target)
        self._resolving.pop()
        if resolved.hops > _MOST_HOPS:
            raise _too_many_hops(at)
        self._resolved[at] = resolved
        return resolved

    def _follow(self, at: Path, target: str) -> Resolved:
        """Follow a target from the link's directory. Raises ArchiveError if it leaves the tree."""
        name = "/".join(at)
        if target.startswith("/"):
            raise self._leaves(name, target)
        current, hops = at[:-1], 1
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
                inner = self._resolve(current, node)
                current, hops = inner.path, hops + inner.hops
        return Resolved(current, hops)

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
            "InvalidFile",
            name,
            f"is a symbolic link to {target[:120]!a}, which is not in the workspace."
            " Replace it with a copy, or select a subPath that contains both",
        )


def _too_many_hops(path: Path) -> ArchiveError:
    why = f"leads to itself, or through more than {_MOST_HOPS} links. Replace it with a copy"
    return refused("InvalidFile", "/".join(path), f"is a link that {why}")


def _is_git_dir(part: str) -> bool:
    """Whether the name is .git, also for the file systems of Windows and macOS."""
    bare = "".join(c for c in part if unicodedata.category(c) != "Cf")
    return bare.casefold().rstrip(" .") in (".git", "git~1")
