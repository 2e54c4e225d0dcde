"""The git source: a shallow fetch of one commit by the git program, without a checkout.

git fetches into a bare repository, without configuration, hooks or attributes of others. The tree
is read with ls-tree and cat-file and written like that of any other source. There is no checkout,
so no filters run, no links are followed and .gitattributes has no effect. Submodules and Git LFS
are skipped, with a line in the log.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchrun_api.contract.sync import SYNC_COMMIT
from torchrun_api.kinds.workspace import GIT_REF
from torchrun_runtime.sync.address import Location
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.git.errors import explain
from torchrun_runtime.sync.git.tree import Blob, Repository
from torchrun_runtime.sync.paths import PlannedPath
from torchrun_runtime.sync.programs import Programs
from torchrun_runtime.sync.report import log
from torchrun_runtime.sync.settings import ArchiveLimits
from torchrun_runtime.sync.tree import NewTree, check_places

_PIECE = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TIP = "refs/torchrun/tip"
# Number of commits to search if the server does not serve a commit by its name.
_DEPTHS = (100, 2_000, 50_000)
_REFUSED_REF = re.compile(r"\.\.|//|@\{|/\.|\.lock(/|$)|[/.]$")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

CONFIGURATION = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "credential.helper": "",
    "fetch.recurseSubmodules": "false",
    "fetch.unpackLimit": "1",
    "gc.auto": "0",
    "http.followRedirects": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "maintenance.auto": "false",
    "pack.threads": "2",
    "core.packedGitLimit": "128m",
    "core.bigFileThreshold": "16m",
    "protocol.version": "2",
    "submodule.recurse": "false",
    "transfer.bundleURI": "false",
    "transfer.credentialsInUrl": "die",
}


@dataclass(frozen=True)
class Checkout:
    """The commit to fetch. ref: "" for the default branch; commit: the required one, or ""."""

    location: Location
    ref: str
    commit: str
    sub_path: str

    @property
    def display_name(self) -> str:
        """The name for messages."""
        revision = self.commit or self.ref
        return (
            f"{self.location.display_name} at {revision}"
            if revision
            else self.location.display_name
        )


def check_ref(ref: str, commit: str) -> None:
    """Raises SyncError (InvalidSource), permanent, if one is not empty and invalid."""
    if commit and not _COMMIT.fullmatch(commit):
        message = f"{SYNC_COMMIT.name} {commit[:200]!a} is not a commit."
        raise SyncError("InvalidSource", message, permanent=True)
    if not ref:
        return
    if len(ref) > 255 or not re.fullmatch(GIT_REF, ref) or _REFUSED_REF.search(ref):
        message = (
            f"volumes.workspace.ref {ref[:200]!a} is invalid. Set it to a branch, a tag or a full"
            " commit hash."
        )
        raise SyncError("InvalidSource", message, permanent=True)


class Git:
    """One repository in `directory`, filled from one remote."""

    def __init__(
        self,
        checkout: Checkout,
        programs: Programs,
        directory: Path,
        configuration: dict[str, str],
    ) -> None:
        self._checkout = checkout
        self._programs = programs
        options = [f"{name}={value}" for name, value in (CONFIGURATION | configuration).items()]
        self._git = (
            "git",
            f"--git-dir={directory}",
            "--literal-pathspecs",
            *(word for option in options for word in ("-c", option)),
        )
        self._directory = directory
        names = (checkout.commit, checkout.ref)
        self._initialise(sha256=any(len(n) == 64 and _COMMIT.fullmatch(n) for n in names))

    def _initialise(self, *, sha256: bool) -> None:
        """Create the repository with the object names of the server. Raises SyncError."""
        options = ("--object-format=sha256",) if sha256 else ()  # git knows it since 2.29
        try:
            result = self._programs.run(
                *self._git,
                *("init", "--bare", "--quiet", "--template=", *options, str(self._directory)),
            )
        except FileNotFoundError as error:
            message = "The image of the sync pod has no git. Remove volumes.workspace.image."
            raise SyncError("GitMissing", message, permanent=True) from error
        if result.exit_code:
            raise self._failure(result.output)

    def fetch(self) -> str:
        """Fetch the commit with as little history as possible; its hash. Raises SyncError."""
        revision = self._checkout.commit or self._checkout.ref
        if _COMMIT.fullmatch(revision):
            self._fetch_commit(revision)
            return revision
        is_full_name = revision.startswith("refs/") or revision in ("", "HEAD")
        names = (
            (revision or "HEAD",)
            if is_full_name
            else (f"refs/heads/{revision}", f"refs/tags/{revision}")
        )
        error = ""
        for name in names:
            error = self._fetch(f"+{name}:{_TIP}", depth=1)
            if not error:
                return self._commit_of_tip()
            if "couldn't find remote ref" not in error:
                break
        raise self._failure(error)

    def _fetch_commit(self, commit: str) -> None:
        error = self._fetch(f"+{commit}:{_TIP}", depth=1)
        if not error and self._commit_of_tip() == commit:
            return
        if error and not re.search("unadvertised object|not our ref|remote ref", error):
            raise self._failure(error)
        for depth in _DEPTHS:
            log("looking for the commit in the history", commit=commit, depth=depth)
            error = self._fetch("+refs/*:refs/torchrun/all/*", depth=depth)
            if error:
                raise self._failure(error)
            if self._programs.text(*self._git, "cat-file", "-t", commit) == "commit":
                return
        message = (
            f"{self._checkout.location.display_name} has no commit {commit} on a branch or tag."
            " Push it, and check that the branch was not rewritten."
        )
        raise SyncError("SourceNotFound", message, permanent=False)

    def _fetch(self, refspec: str, depth: int) -> str:
        """Fetch one refspec; "", or the error of git."""
        url = self._checkout.location.url
        result = self._programs.run(
            *self._git,
            *("fetch", f"--depth={depth}", "--no-tags", "--no-recurse-submodules", "--progress"),
            *("--no-write-fetch-head", "--end-of-options", url, refspec),
        )
        if result.exit_code == 0:
            return ""
        if "mismatched algorithms: client sha1" in result.output:
            shutil.rmtree(self._directory)
            self._initialise(sha256=True)
            return self._fetch(refspec, depth)
        return result.output or f"git ended with {result.exit_code}"

    def _commit_of_tip(self) -> str:
        peeled = f"{_TIP}^{{commit}}"
        commit = self._programs.text(
            *self._git, "rev-parse", "--verify", "--end-of-options", peeled
        )
        if not _COMMIT.fullmatch(commit):
            message = (
                f"{self._checkout.display_name} is not a commit. Set volumes.workspace.ref to a"
                " branch, a tag or a commit."
            )
            raise SyncError("SourceNotFound", message, permanent=False)
        return commit

    def _failure(self, stderr: str) -> SyncError:
        packs = self._directory.glob("objects/pack/*")
        if any(pack.stat().st_size >= self._programs.largest for pack in packs):
            # The unpacking process got SIGXFSZ, which git does not report.
            message = f"{self._checkout.display_name} has more than {self._programs.largest} bytes."
            return SyncError("WorkspaceTooLarge", message, permanent=False)
        return explain(stderr, self._checkout.display_name)

    def list(self, commit: str, limits: ArchiveLimits) -> Repository:
        """The files of the commit's subPath. Raises ArchiveError, SyncError."""
        name = f"{commit}:{self._checkout.sub_path}"
        kind = self._programs.text(*self._git, "cat-file", "-t", name)
        if kind != "tree":
            problem = "is a file" if kind else "does not exist"
            message = (
                f"subPath {self._checkout.sub_path!a} {problem} in {self._checkout.display_name}."
            )
            raise SyncError("SourceNotFound", message, permanent=False)
        command = (*self._git, "ls-tree", "-r", "-l", "-z", "--full-tree", name)
        repository = Repository(limits)
        with self._programs.reading(*command) as process:
            assert process.stdout
            for line in _records(process.stdout):
                repository.add(line)
            if process.wait():
                message = f"git cannot list the files of {self._checkout.display_name}."
                raise SyncError("FetchFailed", message, permanent=False)
        return repository

    def write(self, repository: Repository, tree: Path, limits: ArchiveLimits) -> NewTree:
        """Write the tree. Raises ArchiveError, SyncError, OSError."""
        with self._programs.reading(*self._git, "cat-file", "--batch") as process:
            assert process.stdin
            assert process.stdout
            objects = _Objects(process.stdin, process.stdout)
            repository.read_links(objects.read)
            files = list(repository.files(self._programs.check_time))
            check_places([_place(path, blob) for path, blob in files], limits)
            result = NewTree(tree)
            pointers: list[str] = []
            for path, blob in files:
                result.add_file(_place(path, blob), objects.pieces(blob))
                if objects.is_pointer:
                    pointers.append("/".join(path))
        for paths, what in (
            (repository.submodules, "submodules are skipped"),
            (pointers, "files are pointers of Git LFS, whose content is not fetched"),
        ):
            if paths:
                log(what, "warning", count=len(paths), first=", ".join(paths[:3]))
        return result


def _place(path: tuple[str, ...], blob: Blob) -> PlannedPath:
    return PlannedPath(path, executable=blob.executable, size=blob.size)


def _records(stream: IO[bytes]) -> Iterator[bytes]:
    """Records that end with NUL. Raises ArchiveError if one is longer than any path."""
    rest = b""
    while piece := os.read(stream.fileno(), _PIECE):
        *lines, rest = (rest + piece).split(b"\0")
        yield from lines
        if len(rest) > 1 << 16:
            message = "The repository has a path of more than 65536 bytes."
            raise ArchiveError("InvalidFile", message)


class _Objects:
    """git cat-file --batch: reads the name of an object, prints its header and content."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self.is_pointer = False  # whether the last object is one of Git LFS

    def read(self, blob: Blob) -> bytes:
        """The content of a small object."""
        return b"".join(self.pieces(blob))

    def pieces(self, blob: Blob) -> Iterator[bytes]:
        """The content; read it to its end. Raises ArchiveError if the object is missing."""
        self.is_pointer = False
        try:
            self._stdin.write(blob.name.encode() + b"\n")
            self._stdin.flush()
            header = self._stdout.readline(256).split()
        except OSError:
            header = []
        if header[1:] != [b"blob", str(blob.size).encode()]:
            message = f"Cannot read object {blob.name} of the repository."
            raise ArchiveError("InvalidArchive", message)
        remaining = blob.size
        while remaining:
            piece = self._stdout.read(min(remaining, _PIECE))
            if not piece:
                message = f"Object {blob.name} of the repository ends too early."
                raise ArchiveError("InvalidArchive", message)
            if remaining == blob.size < 1024:
                self.is_pointer = piece.startswith(_LFS_POINTER)
            remaining -= len(piece)
            yield piece
        self._stdout.read(1)
