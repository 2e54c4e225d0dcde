"""Modes of files for users that are not the sync pod's."""

import os
from contextlib import suppress
from pathlib import Path


def give(target: Path | int, mode: int) -> None:
    """Set the mode of a path or of an open file, where the file system has modes to set.

    On a share that belongs to one user for all (SMB), they are the mount's, and every change
    is refused with EPERM.
    """
    with suppress(PermissionError):
        os.chmod(target, mode)
