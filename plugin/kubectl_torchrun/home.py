"""The home directory of the user, which a user of a container may not have."""

import os
from pathlib import Path


def home() -> Path:
    """The home directory; without one, a path below which nothing can be read or written.

    A user ID without an entry in /etc/passwd has no home directory, unless HOME is set.
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)
