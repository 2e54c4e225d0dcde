"""A release is made of a commit that is fit for it, and of nothing else."""

from pathlib import Path

import pytest

from release_checkout import EPOCH, FEW, commit_all, copy_checkout, git
from torchrun_release import source, versions
from torchrun_release.errors import ReleaseError


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy_checkout(tmp_path / "checkout", paths=FEW)
    return tmp_path / "checkout"


def refusal(checkout: Path, version: str = "") -> str:
    with pytest.raises(ReleaseError) as refused:
        source.find_commit(checkout, version or versions.current(checkout))
    return str(refused.value)


def test_a_clean_commit_has_its_revision_and_time(checkout: Path) -> None:
    commit = source.find_commit(checkout, versions.current(checkout))
    assert commit == source.Commit(git(checkout, "rev-parse", "HEAD"), EPOCH)


def test_changes_are_named(checkout: Path) -> None:
    (checkout / "README.md").write_text("edited")
    (checkout / "new.txt").write_text("not added")
    message = refusal(checkout)
    assert "commit them" in message
    assert " M README.md" in message
    assert "?? new.txt" in message


def test_ignored_files_are_no_changes(checkout: Path) -> None:
    (checkout / "dist").mkdir()
    (checkout / "dist" / "install.yaml").write_text("earlier")
    source.find_commit(checkout, versions.current(checkout))


def test_another_version_is_refused_with_the_command_that_sets_it(checkout: Path) -> None:
    message = refusal(checkout, "12.34.56")
    assert "make version VERSION=12.34.56" in message
    assert f"the version {versions.current(checkout)}" in message


def test_one_file_with_another_version_is_named(checkout: Path) -> None:
    path = checkout / "Dockerfile"
    path.write_text(path.read_text().replace("ARG VERSION=", "ARG VERSION=9"))
    commit_all(checkout)
    assert f"than {versions.current(checkout)}: Dockerfile\n" in refusal(checkout)


def test_the_changelog_needs_a_date(checkout: Path) -> None:
    path = checkout / "CHANGELOG.md"
    path.write_text(path.read_text().replace(", 2026-01-02", ", unreleased", 1))
    commit_all(checkout)
    assert f"`## {versions.current(checkout)}, YYYY-MM-DD`" in refusal(checkout)


@pytest.mark.parametrize("options", [(), ("--annotate", "--message=tag")])
def test_the_tag_is_this_commit(checkout: Path, options: tuple[str, ...]) -> None:
    version = versions.current(checkout)
    git(checkout, "tag", *options, f"v{version}")
    source.find_commit(checkout, version)
    (checkout / "new.txt").write_text("later")
    commit_all(checkout)
    assert f"git checkout v{version}" in refusal(checkout)


def test_a_folder_without_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "needs git" in refusal(tmp_path, "0.2.0")


def test_the_export_is_the_commit(checkout: Path, tmp_path: Path) -> None:
    commit = source.find_commit(checkout, versions.current(checkout))
    (checkout / "README.md").write_text("edited")
    (checkout / "api" / "new.py").write_text("")
    source.export(checkout, commit, tmp_path / "exported")
    assert (tmp_path / "exported" / "README.md").read_text() != "edited"
    assert not (tmp_path / "exported" / "api" / "new.py").exists()
    assert (tmp_path / "exported" / "Dockerfile").stat().st_mtime == EPOCH
