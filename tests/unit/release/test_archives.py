"""Archives depend on nothing but their content."""

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from torchrun_release import archives
from torchrun_release.archives import File

EPOCH = 1767323045
FILES = {"b/run": File(b"#!/bin/sh\n", executable=True), "a": File(b"text")}


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz"])
def test_two_archives_are_the_same(tmp_path: Path, name: str) -> None:
    one, two = tmp_path / "1" / name, tmp_path / "2" / f"other-{name}"
    for path in (one, two):
        path.parent.mkdir()
    archives.write_tar(one, FILES, EPOCH)
    archives.write_tar(two, dict(reversed(FILES.items())), EPOCH)
    os.utime(two, (0, 0))
    assert one.read_bytes() == two.read_bytes()
    assert archives.read_tar(one) == FILES


def test_entries_are_sorted_and_have_one_time_and_owner(tmp_path: Path) -> None:
    archives.write_tar(tmp_path / "x.tgz", FILES, EPOCH)
    assert int.from_bytes((tmp_path / "x.tgz").read_bytes()[4:8], "little") == EPOCH
    with tarfile.open(tmp_path / "x.tgz", "r:gz") as tar:
        entries = [(e.name, e.mode, e.mtime, e.uid, e.gid, e.uname) for e in tar]
    assert entries == [("a", 0o644, EPOCH, 0, 0, ""), ("b/run", 0o755, EPOCH, 0, 0, "")]


def test_wheels_for_several_pythons_are_merged(tmp_path: Path) -> None:
    for python in ("311", "312"):
        with zipfile.ZipFile(tmp_path / f"x-1-cp{python}-any.whl", "w") as wheel:
            wheel.writestr("x/__init__.py", "")
            wheel.writestr(f"x/_core.cpython-{python}.so", python)
            wheel.writestr("x-1.dist-info/METADATA", "Name: x")
            wheel.writestr("x-1.dist-info/RECORD", python)
    merged = archives.read_wheels(tmp_path.glob("*.whl"))
    assert set(merged) == {
        *("x/__init__.py", "x-1.dist-info/METADATA"),
        *("x/_core.cpython-311.so", "x/_core.cpython-312.so"),
    }


def test_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    archives.write_sums(tmp_path)
    archives.write_sums(tmp_path)
    lines = (tmp_path / archives.SUMS).read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["a.txt", "b.txt"]
    check = ["sha256sum", "--check", "--strict", "--quiet", archives.SUMS]
    subprocess.run(check, cwd=tmp_path, check=True)
    (tmp_path / "b.txt").write_text("changed")
    assert subprocess.run(check, cwd=tmp_path, check=False, capture_output=True).returncode == 1
