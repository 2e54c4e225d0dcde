"""The files of a directory that make its workspace, by names, links and sizes; none is read."""

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
# Files and directories that links may add: as many as a workspace may have.
MOST_COPIES = 200_000
_SHOWN = 10  # links in a message


class File(NamedTuple):
    """One file: its name in the workspace (parts joined by `/`), its place here, its bytes."""

    path: str
    source: Path
    size: int
    executable: bool


class LeftOut(NamedTuple):
    """A path that is left out although no ignore file names it, and why."""

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
    """An ignore file, and its directory as a path prefix from the top. ours: a .torchrunignore."""

    prefix: str
    rules: IgnoreFile
    ours: bool


def scan(root: Path, overlay: Path | None = None) -> Tree:
    """The workspace of this directory. Raises UsageProblem naming what cannot be part of one.

    The files of `overlay`, which obeys the same rules, replace those of the same path.

    Left out are: `.git`, what .gitignore and .torchrunignore files name (those above the directory
    too, up to the top of its git repository), secrets (see `sensitive`), virtual environments,
    caches, and what is not a file, directory or link. A link is taken as a copy of what it points
    to, where that is itself part of the workspace. A link that leads out of the workspace or to a
    directory that contains it is refused, and so are links that make more than MOST_COPIES copies.
    """
    walk = _Walk(root.resolve())
    walk.run()
    copies = _Copies(walk)
    copies.make()
    tree = copies.tree()
    return tree if overlay is None else _overlaid(tree, scan(overlay))


def _overlaid(below: Tree, above: Tree) -> Tree:
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
    """The files, directories and links below a root that no rule leaves out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prefix, self.outer = _outer_scopes(root)
        self.files: dict[str, File] = {}
        self.directories: dict[str, list[str]] = {}  # each with the names of its entries
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
        if _ignored(top_path, scopes, directory=directory):
            return True
        if sensitive.SECRETS.match(path, directory=directory):
            ours = tuple(scope for scope in scopes if scope.ours)
            if _ignored(top_path, ours, directory=directory) is not False:
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


class _Copies:
    """The copies that links stand for: each file below a link under the link's own path.

    Links multiply: of two links to a directory with two links each come four copies, and so on.
    The number of copies is bounded, so that time and memory are.
    """

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        self._files = dict(walk.files)
        self._directories = set(walk.directories) - {""}
        self._left_out = list(walk.left_out)
        self._refused: dict[str, str] = {}  # by link: where it was met first, and its target
        self._targets: dict[str, Path] = {}
        self._steps = 0

    def make(self) -> None:
        """Add the copies. Raises UsageProblem."""
        added: dict[str, int] = {}
        for link in self._walk.links:
            before = self._steps
            self._add_link(link, link, frozenset(_parents(link)))
            added[link] = self._steps - before
            if self._steps > MOST_COPIES:
                break
        if self._refused:
            raise UsageProblem(
                "These links lead out of the directory, or in a circle:\n"
                + "".join(f"  {link}\n" for link in [*self._refused.values()][:_SHOWN])
                + (f"  and {more} more\n" if (more := len(self._refused) - _SHOWN) > 0 else "")
                + f"Copy in what they point to, or name them in {TORCHRUNIGNORE}."
            )
        if self._steps > MOST_COPIES:
            largest = sorted(added, key=lambda link: -added[link])[:_SHOWN]
            raise UsageProblem(
                f"Links to directories make more than {MOST_COPIES:,} files of"
                f" {len(self._walk.files):,}, as each link is sent as a copy of what it points"
                " to:\n"
                + "".join(f"  {link} -> {self._shown_target(link)}\n" for link in largest)
                + f"Name those that the run does not need in {TORCHRUNIGNORE}."
            )

    def tree(self) -> Tree:
        """The workspace with its copies, in the order of its archive."""
        filled = {
            parent for path in (*self._files, *self._directories) for parent in _parents(path)
        }
        files = sorted(self._files.values(), key=lambda file: os.fsencode(file.path))
        empty = sorted(self._directories - filled, key=os.fsencode)
        return Tree(self._walk.root, tuple(files), tuple(empty), tuple(sorted(self._left_out)))

    def _add_link(self, link: str, path: str, above: frozenset[str]) -> None:
        """Add what the link points to under `path`.

        above: the real directories that contain the copy, by which a circle is found.
        """
        self._steps += 1
        root, real = self._walk.root, self._real_path(link)
        target = "" if real == root else os.path.relpath(real, root)
        if not real.is_relative_to(root) or target in above:
            self._refused.setdefault(link, f"{path} -> {self._shown_target(link)}")
        elif target in self._walk.files:
            self._files[path] = self._walk.files[target]._replace(path=path)
        elif target in self._walk.directories:
            self._add_directory(target, path, above | {target})
        else:
            reason = "is left out" if real.exists() else "does not exist"
            self._left_out.append(LeftOut(path, f"a link to {target}, which {reason}"))

    def _add_directory(self, directory: str, path: str, above: frozenset[str]) -> None:
        self._steps += 1
        self._directories.add(path)
        for name in self._walk.directories[directory]:
            if self._steps > MOST_COPIES:
                return
            source, copy = f"{directory}/{name}", f"{path}/{name}"
            if source in self._walk.files:
                self._steps += 1
                self._files[copy] = self._walk.files[source]._replace(path=copy)
            elif source in self._walk.links:
                self._add_link(source, copy, above)
            else:
                self._add_directory(source, copy, above | {source})

    def _real_path(self, link: str) -> Path:
        if link not in self._targets:
            self._targets[link] = Path(os.path.realpath(self._walk.links[link]))
        return self._targets[link]

    def _shown_target(self, link: str) -> str:
        return os.readlink(self._walk.links[link])


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition("/")[0]
        yield path


def _ignored(top_path: str, scopes: tuple[_Scope, ...], *, directory: bool) -> bool | None:
    """True: ignored. False: taken in again. None: no ignore file names the path."""
    for scope in reversed(scopes):
        ignored = scope.rules.match(top_path[len(scope.prefix) :], directory=directory)
        if ignored is not None:
            return ignored
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
        rules = gitignore.read(place / GITIGNORE)
        scopes = (*scopes, _Scope(prefix, rules, ours=False))
        place = place / part
        if _ignored(place.relative_to(top).as_posix(), scopes, directory=True):
            return "", ()  # the directory itself is ignored, and yet the user chose it
    return root.relative_to(top).as_posix() + "/", scopes
