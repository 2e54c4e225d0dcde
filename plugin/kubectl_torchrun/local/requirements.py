"""The Python environment of a job on this machine: what its setup pod would install."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from kubectl_torchrun.home import home
from torchrun_api.contract import launch
from torchrun_api.kinds.job import TorchrunJobSpec

# Files at the top of the directory that pip usually reads.
_PIP_FILES = ("*requirements*.txt", "pyproject.toml", "setup.py", "setup.cfg")


def variables(spec: TorchrunJobSpec, directory: Path) -> dict[str, str]:
    """Return the variables of the environment and of its recipe; none without requirements.

    The environment is kept in the user's cache. Its key covers the recipe, the Python and the files
    that pip reads.
    """
    if not (spec.requirements or spec.setup_command):
        return {}
    recipe = json.dumps({"requirements": spec.requirements, "command": spec.setup_command})
    folder = _cache() / "environments" / _digest(str(directory.resolve()))
    key = _digest(recipe, python(), *_contents(spec, directory))
    return {
        launch.ENV_STORE.name: str(folder / "store"),
        launch.ENV_KEY.name: key,
        launch.ENV_DIR.name: str(folder / "current"),
        launch.SETUP.name: recipe,
    }


def python() -> str:
    """Return the Python that a command on this machine would use."""
    return shutil.which("python3") or shutil.which("python") or sys.executable


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "kubectl-torchrun"


def _contents(spec: TorchrunJobSpec, directory: Path) -> list[str]:
    named = [entry[2:].strip() for entry in spec.requirements if entry.startswith("-r")]
    paths = [directory / name for name in named]
    paths += [path for pattern in _PIP_FILES for path in sorted(directory.glob(pattern))]
    return [path.read_text(errors="replace") for path in paths if path.is_file()]


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "replace") + b"\0")
    return digest.hexdigest()[:16]
