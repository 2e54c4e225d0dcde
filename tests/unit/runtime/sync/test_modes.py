"""Modes on file systems that have them, and on those that have not."""

import os
from pathlib import Path

import pytest

from torchrun_runtime.sync.modes import give


def test_paths_and_open_files_get_their_modes(tmp_path: Path):
    path = tmp_path / "file"
    path.touch(0o600)
    give(path, 0o755)
    assert path.stat().st_mode & 0o777 == 0o755
    with path.open("rb") as file:
        give(file.fileno(), 0o644)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to own a file of somebody else's")
def test_what_belongs_to_another_user_keeps_its_mode(tmp_path: Path):
    """As on an SMB share, where all files are the mount's user's."""
    path = tmp_path / "file"
    path.touch(0o666)
    mode = path.stat().st_mode
    os.seteuid(65532)
    try:
        with pytest.raises(PermissionError):
            os.chmod(path, 0o755)
        give(path, 0o755)
    finally:
        os.seteuid(0)
    assert path.stat().st_mode == mode
