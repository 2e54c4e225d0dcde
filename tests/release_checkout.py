"""A copy of this checkout as a repository of its own, with a commit that is fit for a release."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pages import ROOT
from torchrun_release import versions

TIME = "2026-01-02T03:04:05Z"
EPOCH = 1767323045
"""The same in seconds since 1970."""
ENVIRONMENT = {
    **{
        f"GIT_{who}_{what}": f"{who}@example.com"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
    **{f"GIT_{who}_DATE": TIME for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_CONFIG_{scope}": "/dev/null" for scope in ("GLOBAL", "SYSTEM")},
}


def git(root: Path, *arguments: str) -> str:
    """Run git in the repository and return its stdout."""
    return subprocess.run(
        ["git", *arguments],
        cwd=root,
        env={**os.environ, **ENVIRONMENT},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()


def commit_all(root: Path) -> None:
    """Commit everything."""
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=A release")


FEW = (*(path for path, _ in versions.PLACES), "CHANGELOG.md", ".gitignore", "api/torchrun_api")
"""What the checks before a release read, and a folder."""


def copy_checkout(target: Path, version: str = "", paths: Sequence[str] = ()) -> None:
    """Copy the files of this checkout, set the version, date its changelog, and commit all.

    Files that are not committed yet are copied as well. "" is the version that the files have,
    `paths` limits what is copied.
    """
    options = ("-z", "--cached", "--others", "--exclude-standard")
    listed = git(ROOT, "ls-files", *options, "--", *paths)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)
    version = version or versions.current(target)
    versions.set_version(target, version)
    changelog = target / "CHANGELOG.md"
    first = re.compile(r"(?m)^## .+$")
    changelog.write_text(first.sub(f"## {version}, 2026-01-02", changelog.read_text(), count=1))
    git(target, "init", "--quiet", "--initial-branch=main")
    commit_all(target)
