"""Valid tar archives. test_hostile.py has those that are refused."""

import io
import tarfile
from pathlib import Path

import pytest

from torchrun_runtime.sync.archives.tarball import extract_tar
from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.settings import ArchiveLimits


def tarred(directory: Path, *names: str) -> Path:
    """An archive of empty files, and of directories, whose names end in /."""
    path = directory / "archive"
    with tarfile.open(path, "w") as archive:
        for name in names:
            member = tarfile.TarInfo(name.removesuffix("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO())
    return path


def test_keeps_empty_directories(tmp_path: Path) -> None:
    archive = tarred(tmp_path, "./", "./logs/", "./a/b/", "./a/", "./pkg/", "./pkg/train.py")
    manifest = extract_tar(archive, tmp_path / "tree", ArchiveLimits())
    assert [(entry.path, entry.mode) for entry in manifest.entries] == [
        ("a/b", "dir"),
        ("logs", "dir"),
        ("pkg/train.py", "644"),
    ]
    assert (tmp_path / "tree" / "a" / "b").is_dir()


def test_an_archive_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="has no files") as caught:
        extract_tar(tarred(tmp_path, "logs/"), tmp_path / "tree", ArchiveLimits())
    assert caught.value.reason == "EmptyWorkspace"


@pytest.mark.parametrize(
    ("kind", "option"), [(tarfile.SYMTYPE, "tar -h"), (tarfile.LNKTYPE, "tar --hard-dereference")]
)
def test_a_link_names_the_option_that_replaces_it(tmp_path: Path, kind: bytes, option: str):
    with tarfile.open(tmp_path / "a.tar", "w") as opened:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = kind, "file"
        opened.addfile(member)
    with pytest.raises(ArchiveError) as caught:
        extract_tar(tmp_path / "a.tar", tmp_path / "tree", ArchiveLimits())
    assert f"({option})" in caught.value.message
