"""The commit that a release is made of: checked, and exported without anything that git ignores."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from . import versions
from .errors import ReleaseError

MAX_LISTED = 10
"""Changed files that an error names."""


@dataclass(frozen=True)
class Commit:
    """Its full hash, and its time in seconds since 1970: SOURCE_DATE_EPOCH of all builds."""

    revision: str
    epoch: int


def find_commit(root: Path, version: str) -> Commit:
    """The current commit, if it is fit for a release of this version.

    Raises ReleaseError for uncommitted changes, another version in a file, a changelog without a
    dated section of the version, and a tag of the version at another commit.
    """
    versions.check(version)
    try:
        changed = _git(root, "status", "--porcelain").splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise ReleaseError("a release needs git and a checkout of the repository") from error
    if changed:
        listed = "\n".join(changed[:MAX_LISTED] + ["..."] * (len(changed) > MAX_LISTED))
        raise ReleaseError(
            "the checkout has changes that are not committed: commit them, or remove them with"
            f" `git stash --include-untracked`:\n{listed}"
        )
    if differing := versions.differing(root, version):
        raise ReleaseError(
            f"these files have another version than {version}: {', '.join(differing)}\n"
            f"Run `make version VERSION={version}` and commit, or release the version"
            f" {versions.current(root)} that they have"
        )
    heading = rf"(?m)^## {re.escape(version)}, \d{{4}}-\d{{2}}-\d{{2}}$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(encoding="utf-8")):
        raise ReleaseError(
            f"CHANGELOG.md has no dated section of this version: give it the heading"
            f" `## {version}, YYYY-MM-DD` and commit"
        )
    revision, epoch = _git(root, "log", "-1", "--format=%H %ct").split()
    tag = _git(
        root, "for-each-ref", "--format=%(objectname) %(*objectname)", f"refs/tags/v{version}"
    )
    if tag and revision not in tag.split():
        raise ReleaseError(
            f"the tag v{version} is another commit: check it out with `git checkout v{version}`,"
            " or release the next version"
        )
    return Commit(revision, int(epoch))


def export(root: Path, commit: Commit, target: Path) -> None:
    """Write the files of the commit into a new folder, all with the time of the commit."""
    ended = subprocess.run(
        ["git", "archive", "--format=tar", commit.revision],
        cwd=root,
        check=True,
        stdout=subprocess.PIPE,
    )
    with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as tar:
        tar.extractall(target, filter="data")


def _git(root: Path, *arguments: str) -> str:
    ended = subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    )
    return ended.stdout.rstrip("\n")
