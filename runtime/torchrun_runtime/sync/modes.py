"""Modes of files for other users than that of the sync pod."""

import os
from contextlib import suppress
from pathlib import Path


def give(target: Path | int, mode: int) -> None:
    """Set the mode of a path or of an open file, if the file system supports modes.

    On a share of a single user (SMB) the mount determines the modes, and every change fails with
    EPERM.
    """
    with suppress(PermissionError):
        os.chmod(target, mode)
