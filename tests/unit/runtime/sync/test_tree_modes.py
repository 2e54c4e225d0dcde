"""File modes, on file systems with and without them."""

import os
from pathlib import Path

import pytest

from torchrun_runtime.sync.tree import give


def test_paths_and_open_files_get_their_modes(tmp_path: Path):
    path = tmp_path / "file"
    path.touch(0o600)
    give(path, 0o755)
    assert path.stat().st_mode & 0o777 == 0o755
    with path.open("rb") as file:
        give(file.fileno(), 0o644)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to own a file of somebody else's")
def test_files_of_another_user_keep_their_mode(tmp_path: Path):
    """For example on an SMB share, whose files all belong to the user of the mount."""
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
