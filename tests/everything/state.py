"""What has run on this commit, in a file that outlives the process."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from everything.result import Result

FILE = "summary.json"


class State(Struct):
    """`times`: seconds of the last complete run of each suite, on any commit."""

    commit: str
    changed: str = ""
    results: dict[str, Result] = {}
    times: dict[str, float] = {}

    def add(self, suite: str, result: Result, *, complete: bool) -> None:
        """Keep a result."""
        self.results[suite] = result
        if complete:
            self.times[suite] = result.seconds


def load(folder: Path, root: Path) -> State:
    """The state of this commit; empty, with the files of other commits removed, if there is none.

    Raises:
        subprocess.CalledProcessError: `root` is no git checkout with a commit.
    """
    current = State(_git(root, "rev-parse", "HEAD").strip(), _digest_of_changes(root))
    try:
        kept = msgspec.json.decode((folder / FILE).read_bytes(), type=State)
    except (FileNotFoundError, msgspec.DecodeError):
        return current
    if (kept.commit, kept.changed) == (current.commit, current.changed):
        return kept
    shutil.rmtree(folder)
    current.times = kept.times
    return current


def save(state: State, folder: Path) -> None:
    """Replace the file at once, so that an interruption leaves the old or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{FILE}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    new.replace(folder / FILE)


def _digest_of_changes(root: Path) -> str:
    """A digest of all changes that are not committed, with new files; "" for none."""
    if not _git(root, "status", "--porcelain"):
        return ""
    digest = hashlib.sha256(_git(root, "diff", "--binary", "HEAD").encode(errors="replace"))
    for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0"):
        path = root / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _git(root: Path, *arguments: str) -> str:
    command = ("git", "-C", str(root), *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True
    ).stdout
