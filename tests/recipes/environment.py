"""The Python in which the recipes run: `python -m recipes.environment` builds it and prints it.

A virtual environment cannot be moved, so it is built where it stays: in the cache, under a key of
its lock file and of the interpreter. A file that is written last marks it as complete.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from torchrun_cluster.artefacts import locked
from torchrun_cluster.places import cache_home

LOCK = Path(__file__).parents[2] / "requirements" / "recipes.txt"
_COMPLETE = "complete"


def interpreter() -> Path:
    """Path of the Python, whether it is built or not."""
    parts = (LOCK.read_bytes(), sys.version.encode(), platform.platform().encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_home() / "recipes" / key / "bin" / "python"


def is_built() -> bool:
    """Whether the environment is complete."""
    return (interpreter().parents[1] / _COMPLETE).exists()


def build() -> Path:
    """Return the Python, after building its environment if it is missing, and delete older ones.

    Raises:
        subprocess.CalledProcessError: pip fails.
    """
    python = interpreter()
    folder = python.parents[1]
    with locked(folder.parent):
        if is_built():
            return python
        for older in folder.parent.iterdir():
            shutil.rmtree(older)
        print(f"Installing {LOCK.name}, once: several minutes, 5 GB", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = ["install", "--quiet", "--no-cache-dir", "--require-hashes", "-r", str(LOCK)]
        subprocess.run([str(python), "-m", "pip", *install], check=True, stdout=sys.stderr)
        (folder / _COMPLETE).touch()
    return python


if __name__ == "__main__":
    print(build())
