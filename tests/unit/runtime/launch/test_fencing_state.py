"""A state directory that is missing does not stop the launcher."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from torchrun_runtime.launch.fencing import usable


def open_files() -> list[str]:
    """The open files of this process, also those that are deleted."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed in another thread
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return files


def test_a_writable_directory_is_used_unchanged(tmp_path: Path) -> None:
    assert usable(str(tmp_path)) == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert [file for file in open_files() if file.startswith(str(tmp_path))] == []


def test_no_state_directory(capfd: pytest.CaptureFixture[str]) -> None:
    assert usable("") == ""
    assert capfd.readouterr().err == ""


def test_a_missing_directory_is_ignored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert usable(str(tmp_path / "missing")) == ""
    assert "No such file or directory" in capfd.readouterr().err
