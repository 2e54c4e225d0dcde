"""The copy of the workspace follows its revisions, also while the sync pod removes them."""

from pathlib import Path

import pytest

from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.workspace import SharedWorkspace
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.settings import ArchiveLimits
from unit.runtime.serving import publish
from unit.runtime.syncing import archive
from unit.runtime.virtual_time import Clock


def opened(directory: Path) -> Claim:
    directory.mkdir()
    claim = Claim(directory)
    claim.prepare()
    return claim


def taken(claim: Claim, files: "dict[str, bytes]") -> int:
    zipped = claim.incoming / "archive.zip"
    zipped.write_bytes(archive(files))
    return claim.publish(extract(zipped, claim.new, ArchiveLimits())).revision


def contents(directory: Path) -> "dict[str, bytes]":
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_only_changed_files_are_copied(tmp_path: Path) -> None:
    claim, app = opened(tmp_path / "claim"), tmp_path / "app"
    first = {"a.py": b"1", "pkg/b.py": b"1", "pkg/c.py": b"1", "gone/d.py": b"1"}
    taken(claim, first)
    workspace = SharedWorkspace(str(claim.directory), str(app))
    workspace.update()
    (app / "output.txt").write_text("the ranks' own")
    (app / "pkg/c.py").write_text("changed by a rank")
    before = (app / "a.py").stat().st_mtime
    second = {"a.py": b"2", "pkg/b.py": b"1", "pkg/c.py": b"1", "new/e.py": b"1"}
    taken(claim, second)
    workspace.update(2)
    assert workspace.revision == 2
    assert contents(app) == {
        **second, "output.txt": b"the ranks' own", "pkg/c.py": b"changed by a rank"
    }  # fmt: skip
    assert not (app / "gone").exists()
    assert int((app / "a.py").stat().st_mtime) > int(before)


def test_without_a_number_the_newest_revision_is_copied(tmp_path: Path) -> None:
    claim, app = opened(tmp_path / "claim"), tmp_path / "app"
    for text in (b"1", b"2"):
        taken(claim, {"a.py": text})
    workspace = SharedWorkspace(str(claim.directory), str(app))
    workspace.update()
    assert (workspace.revision, contents(app)) == (2, {"a.py": b"2"})


def test_a_file_and_an_empty_directory_may_take_the_place_of_each_other(tmp_path: Path) -> None:
    app = tmp_path / "app"
    workspace = SharedWorkspace(str(tmp_path / "claim"), str(app))
    for number, empty in enumerate(((), ("x",), ()), start=1):
        files = {"a.py": b"1"} if empty else {"a.py": b"1", "x": b"2"}
        publish(tmp_path / "claim", files, *empty)
        workspace.update(number)
        assert (app / "x").is_dir() == bool(empty)


def test_a_revision_that_is_not_visible_yet_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, app = opened(tmp_path / "claim"), tmp_path / "app"

    class Storage(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if not claim.tree(1).exists():
                taken(claim, {"a.py": b"1"})

    monkeypatch.setattr("torchrun_runtime.launch.output.time", Storage())
    workspace = SharedWorkspace(str(claim.directory), str(app))
    workspace.update(1)
    assert contents(app) == {"a.py": b"1"}


def test_a_removed_revision_is_replaced_by_the_newest(tmp_path: Path) -> None:
    claim = opened(tmp_path / "claim")
    for text in (b"1", b"2", b"3"):
        taken(claim, {"a.py": text})
    claim.prepare()
    workspace = SharedWorkspace(str(claim.directory), str(tmp_path / "app"))
    workspace.update(1)
    assert workspace.revision == 3
    assert contents(tmp_path / "app") == {"a.py": b"3"}


def test_no_file_stays_of_a_revision_that_is_removed_while_it_is_copied(tmp_path: Path) -> None:
    claim, app = opened(tmp_path / "claim"), tmp_path / "app"
    taken(claim, {"a.py": b"1", "platform.py": b"1", "pkg/b.py": b"1"})
    workspace = SharedWorkspace(str(claim.directory), str(app))
    workspace.update()
    (app / "output.txt").write_text("the ranks' own")
    taken(claim, {"a.py": b"2", "platform.py": b"1", "m.py": b"2", "pkg": b"2", "z.py": b"2"})
    taken(claim, {"a.py": b"3", "pkg/b.py": b"1"})
    (claim.tree(2) / "z.py").unlink()  # the sync pod has removed this file, and not yet the others
    workspace.update(2)
    assert workspace.revision == 3
    own = {"output.txt": b"the ranks' own"}
    assert contents(app) == {"a.py": b"3", "pkg/b.py": b"1", **own}
    taken(claim, {"a.py": b"4"})
    workspace.update(4)
    assert contents(app) == {"a.py": b"4", **own}


def test_no_file_stays_of_a_first_revision_whose_copy_fails(tmp_path: Path) -> None:
    claim, app = opened(tmp_path / "claim"), tmp_path / "app"
    taken(claim, {**{f"{number}.py": b"1" for number in range(100)}, "z.py": b"1"})
    taken(claim, {"a.py": b"2"})
    (app / "z.py").mkdir(parents=True)  # fails the copy of one file, and its batch
    workspace = SharedWorkspace(str(claim.directory), str(app))
    workspace.update(1)
    assert contents(app) == {"a.py": b"2"}


def test_a_revision_without_its_manifest_is_one_that_is_being_removed(tmp_path: Path) -> None:
    claim, app = opened(tmp_path / "claim"), tmp_path / "app"
    taken(claim, {"a.py": b"1", "gone.py": b"1"})
    taken(claim, {"a.py": b"2"})
    (claim.directory / "revisions/1/manifest").unlink()
    workspace = SharedWorkspace(str(claim.directory), str(app))
    workspace.update(1)
    assert (workspace.revision, contents(app)) == (2, {"a.py": b"2"})


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_revision_without_a_part_of_its_files_is_not_copied(tmp_path: Path, damage: str) -> None:
    claim, app = opened(tmp_path / "claim"), tmp_path / "app"
    files = {"a.py": b"12", "pkg/b.py": b"1"}
    taken(claim, files)
    if damage == "missing":
        (claim.tree(1) / "pkg/b.py").unlink()
    else:
        (claim.tree(1) / "a.py").write_bytes(b"1")
    workspace = SharedWorkspace(str(claim.directory), str(app))
    with pytest.raises(LaunchError, match="revision 1 is incomplete"):
        workspace.update()
    assert workspace.revision == 0
    taken(claim, files)
    workspace.update(1)
    assert (workspace.revision, contents(app)) == (2, files)


def test_a_file_that_is_too_short_is_not_copied_by_a_reload(tmp_path: Path) -> None:
    claim = opened(tmp_path / "claim")
    taken(claim, {"a.py": b"1"})
    workspace = SharedWorkspace(str(claim.directory), str(tmp_path / "app"))
    workspace.update()
    taken(claim, {"a.py": b"12"})
    (claim.tree(2) / "a.py").write_bytes(b"1")
    with pytest.raises(LaunchError, match="revision 2 is incomplete"):
        workspace.update(2)
