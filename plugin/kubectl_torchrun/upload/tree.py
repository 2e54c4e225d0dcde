"""The files of a directory that form its workspace: names, links and sizes, without content."""

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload import git_index, gitignore, sensitive
from kubectl_torchrun.upload.gitignore import IgnoreFile

GITIGNORE = ".gitignore"
TORCHRUNIGNORE = ".torchrunignore"
# Files and directories that links may add: the limit of a workspace.
MOST_COPIES = 200_000
_MAX_LINKS = 10  # links in a message
_MOST_SKIPPED = 8  # paths that are printed


class File(NamedTuple):
    """One file. path: in the workspace, joined by `/`; source: on this machine; size: bytes."""

    path: str
    source: Path
    size: int
    executable: bool


class Skipped(NamedTuple):
    """A path that is not uploaded although it matches no ignore file."""

    path: str
    reason: str


_SECRET = "may contain a secret"  # noqa: S105
_INCLUDED_SECRET = f"may contain a secret, and {TORCHRUNIGNORE} includes it"


class Tree(NamedTuple):
    """A workspace, in the order of its archive."""

    root: Path
    files: tuple[File, ...]
    empty_directories: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def included_secrets(self) -> list[str]:
        """The likely secrets that .torchrunignore includes, and the user has not allowed."""
        return [path for path, reason in self.skipped if reason == _INCLUDED_SECRET]


class _Scope(NamedTuple):
    """An ignore file, and its directory as a path prefix from the top of the repository."""

    prefix: str
    rules: IgnoreFile
    is_torchrunignore: bool


class _Repository(NamedTuple):
    """A git repository. prefix: of its top directory, as in `_Scope`. tracked: its paths."""

    prefix: str
    tracked: frozenset[str]

    def tracks(self, top_path: str) -> bool:
        """Whether git tracks this file or submodule, or a file in this directory."""
        return top_path[len(self.prefix) :] in self.tracked


class _Place(NamedTuple):
    """A directory of the walk. is_ignored: only what its repository tracks is part of it."""

    path: str
    source: Path
    scopes: tuple[_Scope, ...]
    repository: _Repository
    is_ignored: bool = False

    @property
    def torchrun_scopes(self) -> tuple[_Scope, ...]:
        """The .torchrunignore files, which decide on tracked files and secrets, too."""
        return tuple(scope for scope in self.scopes if scope.is_torchrunignore)


def scan(root: Path, overlay: Path | None = None, allowed: Collection[str] = frozenset()) -> Tree:
    """The workspace of this directory.

    Raises UsageProblem for paths that cannot be read or cannot be part of it.

    A file that git tracks matches no .gitignore. Nor does one of a submodule or a nested repository
    match those outside of it.

    allowed: paths of likely secrets that .torchrunignore may include, because the user knows it.

    The files of `overlay` replace those of the same path. It obeys the same rules, but no ignore
    files above it: the user has selected it, and it may be a temporary directory anywhere.

    Excluded: `.git`, matches of .gitignore and .torchrunignore files (including those above the
    directory, up to the top of its git repository), secrets (see `sensitive`), virtual
    environments, caches, a file to which this process writes its output, and all but files,
    directories and links. A link becomes a copy of its target if the target is part of the
    workspace. UsageProblem is raised for a link that leads out of the workspace or to a directory
    that contains it, and for more than MOST_COPIES copies.
    """
    tree = _scan(root, allowed)
    return tree if overlay is None else _overlaid(tree, _scan(overlay, None))


def _scan(root: Path, allowed: Collection[str] | None) -> Tree:
    try:
        walk = _Walk(root.resolve(), allowed)
        walk.run()
        copies = _Copies(walk)
        copies.make()
    except OSError as error:
        raise unreadable(error.filename or root, error) from None
    return copies.tree()


def note_skipped(files: Tree, terminal: Display) -> None:
    """Print paths that are not uploaded although they match no ignore file."""
    for path, reason in files.skipped[:_MOST_SKIPPED]:
        terminal.note(f"Skipped: {path} ({reason})")
    if len(files.skipped) > _MOST_SKIPPED:
        terminal.note(f"Skipped: {len(files.skipped) - _MOST_SKIPPED} more")
    if any(reason == _SECRET for _, reason in files.skipped):
        terminal.note(f"To upload such a file, add !NAME to {TORCHRUNIGNORE}.")
    if files.included_secrets:
        terminal.note(
            "To upload such a file, run the command in a terminal, which asks once, or put it into"
            " a directory for --overlay."
        )


def unreadable(path: Path | str, error: OSError) -> UsageProblem:
    """The problem of a file or directory that cannot be read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return UsageProblem(f"{path} was deleted while being read. Try again.")
    if isinstance(error, PermissionError):
        return UsageProblem(
            f"Cannot read {path}. Change its permissions, or add it to {TORCHRUNIGNORE}."
        )
    return UsageProblem(f"Cannot read {path}: {error.strerror}.")


def _overlaid(below: Tree, above: Tree) -> Tree:
    files = {file.path: file for file in (*below.files, *above.files)}
    empty = {*below.empty_directories, *above.empty_directories}
    filled = {parent for path in (*files, *empty) for parent in _parents(path)}
    # Each is a file in one of the trees, and a directory in the other.
    collisions = files.keys() & (empty | filled)
    if collisions:
        both = ", ".join(sorted(collisions)[:5])
        raise UsageProblem(
            f"--overlay replaces a file with a directory, or a directory with a file: {both}."
            " Rename them."
        )
    empty -= filled
    return Tree(
        below.root,
        tuple(sorted(files.values(), key=lambda file: os.fsencode(file.path))),
        tuple(sorted(empty, key=os.fsencode)),
        below.skipped + above.skipped,
    )


class _Walk:
    """The files, directories and links below a root that no rule excludes.

    allowed: likely secrets that .torchrunignore may include. None: all of them, and ignore files
    above the root do not apply.
    """

    def __init__(self, root: Path, allowed: Collection[str] | None) -> None:
        self.root = root
        self.prefix, self.outer = ("", ()) if allowed is None else _outer_scopes(root)
        self._allowed = allowed
        self.files: dict[str, File] = {}
        self.directories: dict[str, list[str]] = {}  # each with the names of its entries
        self.links: dict[str, Path] = {}
        self.skipped: list[Skipped] = []
        self._outputs = _output_files()

    def run(self) -> None:
        top = self.root.parents[self.prefix.count("/") - 1] if self.prefix else None
        repository = self._repository("", top) if top else _Repository("", frozenset())
        pending = [_Place("", self.root, self.outer, repository)]
        while pending:
            place = pending.pop()
            entries = self._entries(place.source)
            place = self._entered(place, entries)
            names = self.directories.setdefault(place.path, [])
            for entry in entries:
                child = f"{place.path}/{entry.name}" if place.path else entry.name
                directory = entry.is_dir(follow_symlinks=False)
                top_path = self.prefix + child
                tracked = place.repository.tracks(top_path)
                ignored = place.is_ignored or _ignored(top_path, place.scopes, directory=directory)
                own = _ignored(top_path, place.torchrun_scopes, directory=directory)
                if own if tracked else ignored:
                    continue
                if self._is_skipped(child, own, directory=directory, tracked=tracked):
                    continue
                if directory:
                    source = Path(entry.path)
                    pending.append(
                        place._replace(path=child, source=source, is_ignored=bool(ignored))
                    )
                    names.append(entry.name)
                elif self._take(child, entry):
                    names.append(entry.name)

    def _entered(self, place: _Place, entries: list[os.DirEntry[str]]) -> _Place:
        """The place with its ignore files, and with its repository if it is the top of one."""
        here = f"{self.prefix}{place.path}/" if place.path else self.prefix
        if any(entry.name == ".git" for entry in entries):
            repository = self._repository(here, place.source)
            place = _Place(place.path, place.source, place.torchrun_scopes, repository)
        return place._replace(scopes=(*place.scopes, *_scopes_in(place.source, here)))

    def _repository(self, prefix: str, top: Path) -> _Repository:
        try:
            return _Repository(prefix, git_index.tracked(top))
        except (OSError, git_index.GitIndexError) as error:
            reason = f"{error}: tracked files that match {GITIGNORE} are not uploaded"
            self.skipped.append(Skipped(os.path.relpath(top / ".git", self.root), reason))
            return _Repository(prefix, frozenset())

    def _entries(self, place: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(place) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):  # deleted since its parent was read
            return []

    def _is_skipped(self, path: str, own: bool | None, *, directory: bool, tracked: bool) -> bool:
        """Whether a path is not uploaded whatever .gitignore says. own: as .torchrunignore says."""
        if path.rpartition("/")[2] in sensitive.ALWAYS:
            return True
        if sensitive.SECRETS.match(path, directory=directory):
            if own is not False:
                self.skipped.append(Skipped(path, _SECRET))
                return True
            if self._allowed is not None and path not in self._allowed:
                self.skipped.append(Skipped(path, _INCLUDED_SECRET))
                return True
        if directory and sensitive.is_environment(self.root / path):
            self.skipped.append(
                Skipped(path, "a virtual environment works only on the machine that created it")
            )
            return True
        return directory and not tracked and sensitive.is_cache(self.root / path)

    def _take(self, path: str, entry: os.DirEntry[str]) -> bool:
        if entry.is_symlink():
            self.links[path] = Path(entry.path)
            return True
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # deleted since the directory was read
            return False
        if not stat.S_ISREG(status.st_mode):
            self.skipped.append(Skipped(path, "not a file, directory or link"))
            return False
        if (status.st_dev, status.st_ino) in self._outputs:
            # It changes with each line that is printed during the upload.
            self.skipped.append(Skipped(path, "this command writes its output to it"))
            return False
        executable = bool(status.st_mode & stat.S_IXUSR)
        self.files[path] = File(path, Path(entry.path), status.st_size, executable)
        return True


class _Copies:
    """The copies that replace links: each file below the target under the path of the link.

    Links multiply: two links to a directory with two links each make four copies, and so on. The
    number of copies is limited, to limit time and memory.
    """

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        self._files = dict(walk.files)
        self._directories = set(walk.directories) - {""}
        self._skipped = list(walk.skipped)
        self._rejected: dict[str, str] = {}  # by link: its first path, and its target
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
        if self._rejected:
            raise UsageProblem(
                "These links point outside the directory, or to a directory above themselves:\n"
                + "".join(f"  {link}\n" for link in [*self._rejected.values()][:_MAX_LINKS])
                + (f"  and {more} more\n" if (more := len(self._rejected) - _MAX_LINKS) > 0 else "")
                + f"Replace them with copies of their targets, or add them to {TORCHRUNIGNORE}."
            )
        if self._steps > MOST_COPIES:
            largest = sorted(added, key=lambda link: -added[link])[:_MAX_LINKS]
            raise UsageProblem(
                f"Links to directories create more than {MOST_COPIES:,} files of"
                f" {len(self._walk.files):,}, because each link is uploaded as a copy of its"
                " target:\n"
                + "".join(f"  {link} -> {self._shown_target(link)}\n" for link in largest)
                + f"Add links that the run does not need to {TORCHRUNIGNORE}."
            )

    def tree(self) -> Tree:
        """The workspace with its copies, in the order of its archive."""
        filled = {
            parent for path in (*self._files, *self._directories) for parent in _parents(path)
        }
        files = sorted(self._files.values(), key=lambda file: os.fsencode(file.path))
        empty = sorted(self._directories - filled, key=os.fsencode)
        return Tree(self._walk.root, tuple(files), tuple(empty), tuple(sorted(self._skipped)))

    def _add_link(self, link: str, path: str, above: frozenset[str]) -> None:
        """Add the target of the link under `path`.

        above: the real directories that contain the copy, to detect a circle.
        """
        self._steps += 1
        root, real = self._walk.root, self._real_path(link)
        target = "" if real == root else os.path.relpath(real, root)
        if not real.is_relative_to(root) or target in above:
            self._rejected.setdefault(link, f"{path} -> {self._shown_target(link)}")
        elif target in self._walk.files:
            self._files[path] = self._walk.files[target]._replace(path=path)
        elif target in self._walk.directories:
            self._add_directory(target, path, above | {target})
        else:
            reason = "is excluded" if real.exists() else "does not exist"
            self._skipped.append(Skipped(path, f"a link to {target}, which {reason}"))

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


def _output_files() -> set[tuple[int, int]]:
    """The device and inode of each file to which this process writes stdout or stderr."""
    files = set()
    for descriptor in (1, 2):
        with suppress(OSError):  # closed
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                files.add((status.st_dev, status.st_ino))
    return files


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition("/")[0]
        yield path


def _ignored(top_path: str, scopes: tuple[_Scope, ...], *, directory: bool) -> bool | None:
    """True: ignored. False: included again by `!`. None: matches no ignore file."""
    for scope in reversed(scopes):
        ignored = scope.rules.match(top_path[len(scope.prefix) :], directory=directory)
        if ignored is not None:
            return ignored
    return None


def _scopes_in(place: Path, prefix: str) -> Iterator[_Scope]:
    for name in (GITIGNORE, TORCHRUNIGNORE):
        if name == GITIGNORE and (place / name).is_symlink():
            continue  # as in git
        rules = gitignore.read(place / name)
        if rules.rules:
            yield _Scope(prefix, rules, is_torchrunignore=name == TORCHRUNIGNORE)


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
        rules = [s for s in _scopes_in(place, prefix) if not s.is_torchrunignore]
        scopes = (*scopes, *rules)
        place = place / part
        if _ignored(place.relative_to(top).as_posix(), scopes, directory=True):
            scopes = ()  # the directory itself is ignored, but the user selected it
            break
    return root.relative_to(top).as_posix() + "/", scopes
