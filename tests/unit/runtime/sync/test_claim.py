"""The PVC of a workspace: several pods, kills in the middle of a removal, markers of releases."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_api.contract.contents import Entry, Manifest
from torchrun_runtime.serve import tree as serve
from torchrun_runtime.sync import fetch
from torchrun_runtime.sync.assemble import Assembly
from torchrun_runtime.sync.claim import NEW, Claim, Marker
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import FetchResult
from torchrun_runtime.sync.paths import PlannedPath
from torchrun_runtime.sync.receive import open_workflow
from torchrun_runtime.sync.settings import ArchiveLimits, SyncSettings
from torchrun_runtime.sync.tree import NewTree

Removal = Callable[[Path], None]


def add(tree: NewTree, *names: str) -> None:
    for name in names:
        tree.add_file(PlannedPath(tuple(name.split("/")), size=len(name)), [name.encode()])


def publish(claim: Claim, *names: str) -> Marker:
    tree = NewTree(claim.new)
    add(tree, *names)
    return claim.publish(tree.manifest)


def files(claim: Claim, marker: Marker) -> set[str]:
    tree = claim.tree(marker.revision)
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}


def names(claim: Claim) -> set[str]:
    return {path.name for path in claim.directory.iterdir()}


def at_removal(monkeypatch: pytest.MonkeyPatch, before: Removal) -> None:
    """Call `before` at the start of each removal of a directory."""
    remove = shutil.rmtree

    def removal(path: Path, ignore_errors: bool = False) -> None:
        before(path)
        remove(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", removal)


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    claim = Claim(tmp_path)
    claim.prepare()
    return claim


def test_a_pod_whose_tree_another_one_removes_neither_writes_nor_publishes_it(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, claim = claim, Claim(claim.directory)
    tree = NewTree(lost.new)
    add(tree, "first.py")
    tried: list[Path] = []

    def work_on(path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            add(tree, "second.py")
        with pytest.raises(FileNotFoundError):
            lost.publish(tree.manifest)
        tried.append(path)

    at_removal(monkeypatch, work_on)
    claim.prepare()
    assert tried
    assert claim.marker() is None
    marker = publish(claim, "next.py")
    assert files(claim, marker) == {"next.py"}


def test_a_revision_that_another_pod_publishes_is_complete_or_missing(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod of a lost machine may stand still between any two steps."""
    lost, claim = claim, Claim(claim.directory)
    publish(lost, "first.py")

    def stand_still(_: Path) -> None:
        claim.prepare()

    monkeypatch.setattr("torchrun_runtime.sync.claim._sync_filesystem", stand_still)
    with pytest.raises(FileNotFoundError):
        publish(lost, "second.py")
    marker = claim.marker()
    assert marker is not None
    assert files(claim, marker) == {"first.py"}


def test_a_pod_that_has_written_nothing_yet_cannot_publish_after_the_next_one(claim: Claim) -> None:
    following = Claim(claim.directory)
    following.prepare()
    with pytest.raises(FileNotFoundError):
        publish(claim, "old.py")
    marker = publish(following, "new.py")
    with pytest.raises(FileNotFoundError):
        claim.confirm(marker, commit="old", source="")
    assert following.marker() == marker


def test_a_fetch_that_ends_leaves_what_the_next_pod_writes(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Claim(claim.directory)
    trees: list[NewTree] = []

    def lose(settings: SyncSettings, work: Path, tree: Path) -> FetchResult:
        NewTree(tree)
        following.prepare()
        following.work.mkdir()
        trees.append(NewTree(following.new))
        add(trees[0], "first.py")
        raise SyncError("FetchFailed", "Lost.", permanent=False)

    monkeypatch.setattr(fetch, "FETCHERS", {"git": lose})
    with pytest.raises(SyncError):
        fetch.fetch(SyncSettings(source="git", directory=claim.directory))
    assert following.work.is_dir()
    add(trees[0], "second.py")
    marker = following.publish(trees[0].manifest)
    assert files(claim, marker) == {"first.py", "second.py"}


@pytest.mark.parametrize("source", ["first", "second"])
@pytest.mark.parametrize("removed", ["tree/a.py", "manifest", "."])
def test_a_revision_that_lacks_files_is_published_again(
    claim: Claim, monkeypatch: pytest.MonkeyPatch, source: str, removed: str
) -> None:
    """A pod of an earlier release on a lost machine may have removed them."""

    def write(settings: SyncSettings, work: Path, new: Path) -> FetchResult:
        tree = NewTree(new)
        add(tree, "a.py", "sub/b.py")
        return FetchResult("commit", tree.manifest)

    monkeypatch.setattr(fetch, "FETCHERS", {"git": write})
    settings = SyncSettings(source="git", directory=claim.directory, digest="first")
    first = fetch.fetch(settings)
    settings = replace(settings, digest=source)
    assert fetch.fetch(settings).revision == first.revision
    lost = claim.directory / "revisions" / str(first.revision) / removed
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    marker = fetch.fetch(settings)
    assert marker.revision == first.revision + 1
    assert files(claim, marker) == {"a.py", "sub/b.py"}
    assert fetch.fetch(settings).revision == marker.revision


def test_the_manifest_of_unchanged_content_is_read_once(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has up to 200,000 lines."""

    def write(settings: SyncSettings, work: Path, new: Path) -> FetchResult:
        tree = NewTree(new)
        add(tree, "a.py")
        return FetchResult("commit", tree.manifest)

    reads: list[Marker] = []

    class Counted(Claim):
        def manifest(self, marker: Marker) -> Manifest:
            reads.append(marker)
            return super().manifest(marker)

    monkeypatch.setattr(fetch, "FETCHERS", {"git": write})
    monkeypatch.setattr(fetch, "Claim", Counted)
    settings = SyncSettings(source="git", directory=claim.directory, digest="first")
    first = fetch.fetch(settings)
    assert fetch.fetch(replace(settings, digest="second")).revision == first.revision
    assert len(reads) == 1


def test_a_kill_during_a_removal_leaves_no_part_of_a_revision(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        publish(claim, "a.py", f"{number}.py")

    def kill(path: Path) -> None:
        next(path.rglob("a.py")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        at_removal(killed, kill)
        with pytest.raises(KeyboardInterrupt):
            claim.prepare()
    assert sorted(os.listdir(claim.directory / "revisions")) == ["2", "3"]
    following = Claim(claim.directory)
    following.prepare()
    following.finish()
    assert not [name for name in names(claim) if name.startswith(NEW)]


def test_what_cannot_be_removed_yet_is_left_to_the_next_pod(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a file that is open on this node becomes .nfs... until it is closed."""
    for number in range(3):
        publish(claim, f"pkg/{number}.py", "a.py")

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    with monkeypatch.context() as refused:
        refused.setattr(os, "rmdir", refuse)
        claim.prepare()
        claim.finish()
    assert sorted(os.listdir(claim.directory / "revisions")) == ["2", "3"]
    following = Claim(claim.directory)
    following.prepare()
    following.finish()
    assert not [name for name in names(claim) if name.startswith(NEW)]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"revision": 3}', '"text"'])
def test_nothing_is_removed_without_a_valid_marker(claim: Claim, content: str) -> None:
    for number in range(2):
        publish(claim, f"{number}.py")
    (claim.directory / ".sync_success").write_text(content)
    claim.prepare()
    assert sorted(os.listdir(claim.directory / "revisions")) == ["1", "2"]
    marker = publish(claim, "next.py")
    assert (marker.revision, files(claim, marker)) == (3, {"next.py"})


def test_a_marker_of_a_later_release_is_read(claim: Claim) -> None:
    marker = publish(claim, "a.py")
    path = claim.directory / ".sync_success"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert claim.marker() == marker


def test_a_manifest_that_cannot_be_read_is_no_empty_one(claim: Claim) -> None:
    marker = publish(claim, "a.py")
    path = claim.tree(1).with_name("manifest")
    text = path.read_text()
    served = serve.ServedTree(claim.directory)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        claim.manifest(marker)
    with pytest.raises(IsADirectoryError):
        served.newest()
    path.rmdir()
    path.write_text(text)
    newest = served.newest()
    assert newest is not None
    assert newest.sha256 == claim.manifest(marker).sha256


def test_a_missing_or_invalid_manifest_is_an_empty_one(claim: Claim) -> None:
    marker = publish(claim, "a.py")
    path = claim.tree(1).with_name("manifest")
    path.write_text("invalid\n")
    assert claim.manifest(marker).entries == ()
    path.unlink()
    assert claim.manifest(marker).entries == ()


def test_a_manifest_belongs_to_its_marker(claim: Claim) -> None:
    first = publish(claim, "a.py")
    second = publish(claim, "b.py", "c.py")
    assert [claim.manifest(marker).files for marker in (first, second)] == [1, 2]


def test_a_base_whose_manifest_cannot_be_read_is_not_used(tmp_path: Path) -> None:
    base = Claim(tmp_path / "base")
    base.directory.mkdir()
    base.prepare()
    publish(base, "a.py")
    path = base.tree(1).with_name("manifest")
    path.unlink()
    path.mkdir()
    claim = Claim(tmp_path / "claim")
    claim.directory.mkdir()
    claim.prepare()
    workflow = open_workflow(SyncSettings(base=base.directory), claim)
    assert workflow.pending.base == ""
    manifest = Manifest([Entry("a.py", "0" * 64, 4, "644")])
    assert Assembly(claim, manifest, ArchiveLimits()).copy_from_base(base) == 0


def test_a_revision_that_cannot_be_moved_stays_whole(
    claim: Claim, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on an SMB share, while a launcher has a file of it open."""
    for number in range(3):
        publish(claim, f"{number}.py")

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    with monkeypatch.context() as refused:
        refused.setattr(os, "rename", refuse)
        claim.prepare()
    assert (claim.tree(1) / "0.py").exists()
    assert "not removed yet" in capfd.readouterr().out
    claim.prepare()
    assert not claim.tree(1).exists()
