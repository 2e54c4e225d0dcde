"""Which entries of a git tree become files of the workspace, and which are refused."""

import json
from dataclasses import replace

import pytest

from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import ArchiveLimits, SyncSettings
from unit.runtime.git_server import GitServer, git, plant, repository
from unit.runtime.syncing import fetch_failure, read_tree

pytestmark = pytest.mark.long  # processes


def test_a_folder_of_the_repository(git_settings: SyncSettings, git_server: GitServer):
    repository(git_server.root / "train", {"llm/a.py": b"1", "llm/b/c": b"2", "other": b"3"})
    marker = fetch(replace(git_settings, sub_path="llm"))
    assert read_tree(git_settings, marker) == {"a.py": b"1", "b/c": b"2"}


@pytest.mark.parametrize(("path", "words"), [("none", "does not exist"), ("llm/a.py", "is a file")])
def test_a_folder_that_is_a_file_or_missing(
    git_settings: SyncSettings, git_server: GitServer, path: str, words: str
):
    repository(git_server.root / "train", {"llm/a.py": b"1"})
    error = fetch_failure(replace(git_settings, sub_path=path))
    assert error.reason == "SourceNotFound"
    assert words in error.message


def test_links_inside_become_what_they_point_to(git_settings: SyncSettings, git_server: GitServer):
    repository(
        git_server.root / "train",
        {
            "a/data": b"1",
            "a/up": "../b/file",
            "b/file": b"2",
            "b/dir": "../a",
            "chain": "b/dir/up",
            "a/here": "./data",
        },
    )
    marker = fetch(git_settings)
    a = {"data": b"1", "up": b"2", "here": b"1"}
    assert read_tree(git_settings, marker) == {
        "b/file": b"2",
        "chain": b"2",
        **{f"a/{name}": content for name, content in a.items()},
        **{f"b/dir/{name}": content for name, content in a.items()},
    }


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../outside", "missing", "a/../../x", "self", "x/y", "."]
)
def test_a_link_that_leaves_the_workspace_is_refused_by_name(
    git_settings: SyncSettings, git_server: GitServer, target: str
):
    repository(git_server.root / "train", {"a/file": b"1", "self": target})
    error = fetch_failure(git_settings)
    assert (error.reason, error.permanent) == ("InvalidFile", True)
    assert "self" in error.message


def test_links_that_multiply_are_stopped(git_settings: SyncSettings, git_server: GitServer):
    files: dict[str, bytes | str] = {"d0/file": b"x"}
    for level in range(1, 20):
        files |= {f"d{level}/{n}": f"../d{level - 1}" for n in range(10)}
    repository(git_server.root / "train", files)
    error = fetch_failure(replace(git_settings, limits=ArchiveLimits(entries=5000)))
    assert error.reason == "WorkspaceTooLarge"


def test_submodules_and_lfs_files_are_skipped_with_a_warning(
    git_settings: SyncSettings, git_server: GitServer, capfd: pytest.CaptureFixture[str]
):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    plant(
        git_server.root / "train",
        [
            ("100644", b".gitattributes", b"* filter=lfs text eol=crlf ident export-ignore\n"),
            ("100644", b"model.bin", pointer),
            ("160000", b"sub", b"1" * 40),
        ],
    )
    marker = fetch(git_settings)
    assert read_tree(git_settings, marker)["model.bin"] == pointer
    assert "sub" not in read_tree(git_settings, marker)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    first = {line["event"]: line["first"] for line in lines if "first" in line}
    assert first == {
        "submodules are skipped": "sub",
        "files are pointers of Git LFS, whose content is not fetched": "model.bin",
    }


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("40000", b"..", b"")], "has the component '..'"),
        ([("40000", b".git", b"")], "is reserved for git"),
        ([("40000", b".GIT", b"")], "is reserved for git"),
        ([("100644", b"../x", b"x")], "has the component '..'"),
        ([("100644", b"\xff", b"x")], "not UTF-8"),
        ([("100644", b"a\n", b"x")], "control character"),
        ([("120000", b"a", b"/etc/passwd")], "is not in the workspace"),
        ([("120000", b"a", b"x" * 5000)], "is a link with a target of more than"),
        ([("100644", b"A", b"x"), ("100644", b"a", b"y")], "only in case"),
        ([("100644", b"a", b"x"), ("100644", b"a", b"y")], "is in the repository twice"),
    ],
)
def test_trees_that_no_git_would_write(
    git_settings: SyncSettings,
    git_server: GitServer,
    entries: list[tuple[str, bytes, bytes]],
    words: str,
):
    source = git_server.root / "train"
    plant(source, [("100644", b"hooks", b"#!/bin/sh\n")])
    inner = git(source, "rev-parse", "HEAD^{tree}").encode()
    plant(source, [(mode, name, content or inner) for mode, name, content in entries])
    error = fetch_failure(git_settings)
    assert (error.reason, error.permanent) == ("InvalidFile", True), error.message
    assert words in error.message
