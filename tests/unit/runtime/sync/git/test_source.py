"""A workspace from git, over https to git's own http-backend: refs, revisions and limits."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import ArchiveLimits, SyncSettings
from unit.runtime.git_server import (
    GitServer,
    commit,
    git,
    repository,
)
from unit.runtime.syncing import fetch_failure, needs_mount, on_small_disk, process, read_tree


def test_the_default_branch_with_every_kind_of_file(
    git_settings: SyncSettings, git_server: GitServer
):
    files = {"train.py": b"print()", "pkg/a b/\u6f22.txt": b"x" * 3_000_000, "empty": b""}
    commit_id = repository(git_server.root / "train", files)
    (git_server.root / "train" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (git_server.root / "train" / "run.sh").chmod(0o755)
    commit_id = commit(git_server.root / "train", {})
    marker = fetch(git_settings)
    assert (marker.commit, marker.files) == (commit_id, 4)
    assert read_tree(git_settings, marker) == files | {"run.sh": b"#!/bin/sh\n"}
    root = Claim(git_settings.directory).tree(marker.revision)
    assert (root / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (root / "train.py").stat().st_mode & 0o777 == 0o644
    assert not (git_settings.directory / ".incoming").exists()


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize(
    "ref", ["dev", "refs/heads/dev", "v1", "refs/tags/v1", "light", "feature/a+b#1", "first"]
)
def test_branches_tags_and_commits(
    git_settings: SyncSettings, git_server: GitServer, ref: str, version: int
):
    git_server.version = version
    source = git_server.root / "train"
    first = repository(source, {"a": b"1"})
    git(source, "tag", "light")
    git(source, "tag", "-a", "v1", "-m", "v1")
    git(source, "branch", "feature/a+b#1")
    dev = commit(source, {"a": b"2"})
    git(source, "branch", "dev")
    commit(source, {"a": b"3"})
    wanted = first if ref == "first" else ref
    marker = fetch(replace(git_settings, ref=wanted))
    expected = (dev, b"2") if "dev" in ref else (first, b"1")
    assert (marker.commit, read_tree(git_settings, marker)["a"]) == expected


def test_a_commit_without_a_ref_is_fetched_from_the_history(
    git_settings: SyncSettings, git_server: GitServer, capfd: pytest.CaptureFixture[str]
):
    git_server.version = 0
    source = git_server.root / "train"
    repository(source, {"a": b"1"})
    wanted = commit(source, {"a": b"2"})
    for number in range(150):
        git(source, "commit", "--quiet", "--allow-empty", "-m", str(number))
    assert fetch(replace(git_settings, ref=wanted)).commit == wanted
    assert [json.loads(line).get("depth") for line in capfd.readouterr().out.splitlines()].count(
        2000
    ) == 1


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("ref", ["no-such-branch", "f" * 40, "refs/heads/none", "abc123"])
def test_a_deleted_ref(git_settings: SyncSettings, git_server: GitServer, ref: str, version: int):
    git_server.version = version
    repository(git_server.root / "train", {"a": b"1"})
    error = fetch_failure(replace(git_settings, ref=ref))
    assert (error.reason, error.permanent) == ("SourceNotFound", False)
    assert ref in error.message
    assert git_settings.url in error.message


def test_a_fetch_that_takes_too_long(git_settings: SyncSettings, git_server: GitServer):
    repository(git_server.root / "train", {"a": b"1"})
    error = fetch_failure(replace(git_settings, fetch_timeout=0.0))
    assert (error.reason, error.permanent) == ("FetchFailed", False)


def test_a_pack_that_is_larger_than_a_workspace_may_be(
    git_settings: SyncSettings, git_server: GitServer
):
    repository(git_server.root / "train", {"noise": random.Random(1).randbytes(1 << 20)})
    error = fetch_failure(replace(git_settings, limits=ArchiveLimits(bytes=1 << 16)))
    assert error.reason == "WorkspaceTooLarge", error.message


def test_an_existing_commit_is_not_fetched_again(git_settings: SyncSettings, git_server: GitServer):
    made = repository(git_server.root / "train", {"a": b"1"})
    git_settings = replace(git_settings, digest="d1")
    first = fetch(git_settings)
    git_server.paths.clear()
    assert fetch(git_settings) == first
    assert fetch(replace(git_settings, commit=made)) == first
    assert git_server.paths == []
    newer = commit(git_server.root / "train", {"a": b"2"})
    again = fetch(replace(git_settings, digest="d2"))
    assert (again.commit, again.revision) == (newer, first.revision + 1)
    assert fetch(replace(git_settings, digest="d2", commit=made)).commit == made
    refetch = fetch(replace(git_settings, digest="d3", commit=made))
    assert refetch.commit == newer, "there was a new request"


def test_the_same_content_keeps_its_revision(git_settings: SyncSettings, git_server: GitServer):
    repository(git_server.root / "train", {"src/a": b"1", "notes": b"1"})
    git_settings = replace(git_settings, sub_path="src")
    first = fetch(replace(git_settings, digest="d1"))
    newer = commit(git_server.root / "train", {"src/a": b"1", "notes": b"2"})
    again = fetch(replace(git_settings, digest="d2"))
    assert (again.commit, again.revision) == (newer, first.revision)
    assert fetch(replace(git_settings, digest="d2")) == again
    claim = Claim(git_settings.directory)
    assert claim.marker() == again
    assert not claim.new.exists()


def test_a_revision_is_higher_than_the_last_one_of_the_job(
    git_settings: SyncSettings, git_server: GitServer
):
    """A pod with new storage continues from the revision in the status of the job."""
    repository(git_server.root / "train", {"a": b"1"})
    first = fetch(replace(git_settings, digest="d1", last_revision=4))
    assert first.revision == 5
    assert fetch(replace(git_settings, digest="d1", last_revision=4)) == first


@needs_mount
def test_a_claim_that_is_full(
    tmp_path: Path, git_server: GitServer, git_environment: dict[str, str]
):
    repository(git_server.root / "train", {"noise": random.Random(1).randbytes(3 << 20)})
    with process(tmp_path, *on_small_disk(tmp_path, "1m"), **git_environment) as running:
        code, message = running.end()
    assert (code, message["reason"], message["permanent"]) == (1, "WorkspaceFull", False)
    assert "Increase volumes.workspace.size in a new job" in str(message["message"])


def test_a_later_job_fetches_again_on_a_retained_claim(
    git_settings: SyncSettings, git_server: GitServer
):
    repository(git_server.root / "train", {"a": b"1"})
    first_job = replace(git_settings, digest="d1", job="first")
    first = fetch(first_job)
    newer = commit(git_server.root / "train", {"a": b"2"})
    assert fetch(first_job) == first
    second_job = replace(first_job, job="second")
    second = fetch(second_job)
    assert (second.commit, second.revision) == (newer, first.revision + 1)
    assert fetch(second_job) == second
    third_job = replace(first_job, job="third")
    third = fetch(third_job)
    assert (third.commit, third.revision) == (newer, second.revision), "the content is the same"
    git_server.paths.clear()
    assert fetch(third_job) == third
    assert git_server.paths == []


def test_a_pin_stays_on_a_claim_with_the_workspace_of_another_job(
    git_settings: SyncSettings, git_server: GitServer
):
    made = repository(git_server.root / "train", {"a": b"1"})
    commit(git_server.root / "train", {"a": b"2"})
    fetch(replace(git_settings, digest="d1", job="first"))
    pinned = fetch(replace(git_settings, digest="d2", job="second", commit=made))
    assert pinned.commit == made


def test_a_marker_of_a_release_that_recorded_no_job(
    git_settings: SyncSettings, git_server: GitServer
):
    """A job that has run keeps its workspace; a job that has not fetches it."""
    repository(git_server.root / "train", {"a": b"1"})
    recorded = fetch(replace(git_settings, digest="d1"))
    newer = commit(git_server.root / "train", {"a": b"2"})
    settings = replace(git_settings, digest="d1", job="first")
    git_server.paths.clear()
    assert fetch(replace(settings, commit=recorded.commit)) == recorded
    assert git_server.paths == []
    assert fetch(settings).commit == newer


@pytest.mark.parametrize("named", ["main", "commit"])
def test_a_repository_with_sha256_names(
    git_settings: SyncSettings, git_server: GitServer, named: str
):
    directory = git_server.root / "train"
    directory.mkdir(parents=True)
    git(directory, "init", "--quiet", "--initial-branch=main", "--object-format=sha256")
    commit = repository(directory, {"train.py": b"1"})
    assert len(commit) == 64
    marker = fetch(replace(git_settings, ref=commit if named == "commit" else named))
    assert marker.commit == commit
    assert read_tree(git_settings, marker) == {"train.py": b"1"}
