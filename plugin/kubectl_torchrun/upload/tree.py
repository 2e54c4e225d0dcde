"""Which files of a directory make its workspace: a walk that only reads names, links and sizes."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload import gitignore, sensitive
from kubectl_torchrun.upload.gitignore import IgnoreFile

GITIGNORE = ".gitignore"
TORCHRUNIGNORE = ".torchrunignore"


class File(NamedTuple):
    """One file: its name in the workspace (parts joined by `/`), its place here, its bytes."""

    path: str
    source: Path
    size: int
    executable: bool


class LeftOut(NamedTuple):
    """A path that is not taken although no ignore file names it, and why."""

    path: str
    why: str


class Tree(NamedTuple):
    """A workspace, in the order of its archive."""

    root: Path
    files: tuple[File, ...]
    empty_directories: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class _Scope(NamedTuple):
    """An ignore file and the directory (as a path prefix from the top) that it speaks of."""

    prefix: str
    rules: IgnoreFile
    ours: bool


def scan(root: Path, overlay: Path | None = None) -> Tree:
    """The workspace of this directory. Raises UsageProblem naming what cannot be part of one.

    The files of `overlay`, which obeys the same rules, go before those of the same path.

    Left out are: `.git`, what .gitignore and .torchrunignore files name (those above the directory
    too, up to the top of its git repository), secrets (see `sensitive`), virtual environments,
    caches, and what is not a file, directory or link. A link is taken as a copy of what it points
    to, where that is itself part of the workspace; a link that leads out of it is refused.
    """
    walk = _Walk(root.resolve())
    walk.run()
    found = walk.tree()
    return found if overlay is None else _laid_over(found, scan(overlay))


def _laid_over(below: Tree, above: Tree) -> Tree:
    files = {file.path: file for file in (*below.files, *above.files)}
    filled = {parent for path in files for parent in _parents(path)}
    shadowed = {file.path for file in above.files} & ({*below.empty_directories} | filled)
    hidden = {file.path for file in below.files} & {
        parent for file in above.files for parent in _parents(file.path)
    }
    if shadowed or hidden:
        both = ", ".join(sorted(shadowed | hidden)[:5])
        raise UsageProblem(f"What is laid over the directory has other kinds of paths: {both}.")
    empty = {*below.empty_directories, *above.empty_directories} - filled
    return Tree(
        below.root,
        tuple(sorted(files.values(), key=lambda file: os.fsencode(file.path))),
        tuple(sorted(empty, key=os.fsencode)),
        below.left_out + above.left_out,
    )


class _Walk:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.prefix, self.outer = _outer_scopes(root)
        self.files: dict[str, File] = {}
        self.directories: dict[str, list[str]] = {}  # to the names of what was taken in each
        self.links: dict[str, Path] = {}
        self.left_out: list[LeftOut] = []

    def run(self) -> None:
        pending = [("", self.root, self.outer)]
        while pending:
            path, place, scopes = pending.pop()
            here = f"{self.prefix}{path}/" if path else self.prefix
            scopes = (*scopes, *_scopes_in(place, here))
            names = self.directories.setdefault(path, [])
            for entry in self._entries(place):
                child = f"{path}/{entry.name}" if path else entry.name
                directory = entry.is_dir(follow_symlinks=False)
                if self._is_ignored(child, scopes, directory=directory):
                    continue
                if directory:
                    pending.append((child, Path(entry.path), scopes))
                    names.append(entry.name)
                elif self._take(child, entry):
                    names.append(entry.name)

    def _entries(self, place: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(place) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except PermissionError:
            raise UsageProblem(
                f"{place} cannot be read. Change its permissions, or name it in {TORCHRUNIGNORE}."
            ) from None

    def _is_ignored(self, path: str, scopes: tuple[_Scope, ...], *, directory: bool) -> bool:
        name = path.rpartition("/")[2]
        if name in sensitive.ALWAYS:
            return True
        top_path = self.prefix + path
        verdict = _verdict(top_path, scopes, directory=directory)
        if verdict:
            return True
        if sensitive.SECRETS.verdict(path, directory=directory):
            ours = tuple(scope for scope in scopes if scope.ours)
            if _verdict(top_path, ours, directory=directory) is not False:
                self.left_out.append(LeftOut(path, "it may hold a secret"))
                return True
        if directory and sensitive.is_environment(self.root / path):
            self.left_out.append(LeftOut(path, "a virtual environment works on one machine only"))
            return True
        return directory and sensitive.is_cache(self.root / path)

    def _take(self, path: str, entry: os.DirEntry[str]) -> bool:
        if entry.is_symlink():
            self.links[path] = Path(entry.path)
            return True
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # it went away since the directory was read
            return False
        if not stat.S_ISREG(status.st_mode):
            self.left_out.append(LeftOut(path, "not a file, a directory or a link"))
            return False
        executable = bool(status.st_mode & stat.S_IXUSR)
        self.files[path] = File(path, Path(entry.path), status.st_size, executable)
        return True

    def tree(self) -> Tree:
        files = dict(self.files)
        directories = set(self.directories) - {""}
        outside: list[str] = []
        for path in self.links:
            for found in self._linked(path, path, frozenset(_parents(path)), outside):
                if isinstance(found, File):
                    files[found.path] = found
                else:
                    directories.add(found)
        if outside:
            raise UsageProblem(
                "These links lead out of the directory, or in a circle:\n"
                + "".join(f"  {link}\n" for link in outside[:10])
                + (f"  and {len(outside) - 10} more\n" if len(outside) > 10 else "")
                + f"Copy in what they point to, or name them in {TORCHRUNIGNORE}."
            )
        filled = {parent for path in (*files, *directories) for parent in _parents(path)}
        ordered = sorted(files.values(), key=lambda file: os.fsencode(file.path))
        empty = sorted(directories - filled, key=os.fsencode)
        return Tree(self.root, tuple(ordered), tuple(empty), tuple(sorted(self.left_out)))

    def _linked(
        self, link: str, path: str, above: frozenset[str], outside: list[str]
    ) -> Iterator[File | str]:
        """Files and directories (by path) that the link stands for under the name `path`.

        `above`: the real directories that lead to it, so that a circle is seen.
        """
        place = self.links[link]
        real = Path(os.path.realpath(place))
        if not real.is_relative_to(self.root):
            outside.append(f"{path} -> {os.readlink(place)}")
            return
        target = "" if real == self.root else real.relative_to(self.root).as_posix()
        if target in self.files:
            yield self.files[target]._replace(path=path)
        elif target in self.directories:
            if target in above:
                outside.append(f"{path} -> {os.readlink(place)}")
                return
            yield from self._copied(target, path, above | {target}, outside)
        else:
            there = "is left out" if real.exists() else "does not exist"
            self.left_out.append(LeftOut(path, f"a link to {target}, which {there}"))

    def _copied(
        self, directory: str, path: str, above: frozenset[str], outside: list[str]
    ) -> Iterator[File | str]:
        yield path
        for name in self.directories[directory]:
            source, copy = f"{directory}/{name}", f"{path}/{name}"
            if source in self.files:
                yield self.files[source]._replace(path=copy)
            elif source in self.links:
                yield from self._linked(source, copy, above, outside)
            else:
                yield from self._copied(source, copy, above | {source}, outside)


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition("/")[0]
        yield path


def _verdict(top_path: str, scopes: tuple[_Scope, ...], *, directory: bool) -> bool | None:
    for scope in reversed(scopes):
        verdict = scope.rules.verdict(top_path[len(scope.prefix) :], directory=directory)
        if verdict is not None:
            return verdict
    return None


def _scopes_in(place: Path, prefix: str) -> Iterator[_Scope]:
    for name in (GITIGNORE, TORCHRUNIGNORE):
        rules = gitignore.read(place / name)
        if rules.rules:
            yield _Scope(prefix, rules, ours=name == TORCHRUNIGNORE)


def _outer_scopes(root: Path) -> tuple[str, tuple[_Scope, ...]]:
    """The path of `root` from the top of its repository, and the .gitignore files on the way."""
    above = [directory for directory in root.parents if (directory / ".git").exists()]
    if not above or (root / ".git").exists():
        return "", ()
    top = above[0]
    scopes: tuple[_Scope, ...] = ()
    place = top
    for part in root.relative_to(top).parts:
        prefix = "" if place == top else place.relative_to(top).as_posix() + "/"
        found = gitignore.read(place / GITIGNORE)
        scopes = (*scopes, _Scope(prefix, found, ours=False))
        place = place / part
        if _verdict(place.relative_to(top).as_posix(), scopes, directory=True):
            return "", ()  # the directory itself is ignored: who stands in it means it all the same
    return root.relative_to(top).as_posix() + "/", scopes
