"""The job's Python environment, into which `requirements` and `setupCommand` are installed once.

It is a virtual environment on top of the packages of the image, so torch need not be installed
again and the image need not be writable. Environments are in one folder, usually `env/` of the
workspace PVC, named by a digest of their content:

    <key>/       a complete environment, with its marker .complete
    .new-*/      an unfinished one; renamed when it is complete, else discarded

A virtual environment contains its path in many files. Therefore it is always used through a link
with the same path in every pod, wherever the folder is mounted.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from typing import Iterable, Mapping, NamedTuple

from .contract import ENV_DIR
from .errors import LaunchError
from .install import Recipe, install
from .output import say, timestamp, wait_until

MARKER = ".complete"
# The marker of an unfinished environment. A later setup pod removes it with the environment. Then
# an earlier pod that still runs on a lost node cannot finish its environment.
UNFINISHED_MARKER = ".unfinished"
_UNFINISHED = ".new-"
_MAX_ENVIRONMENTS = 2  # the current one and the previous one, which a gang may still use


class Place(NamedTuple):
    """Paths of an environment. folder: of all; key: its name there; link: the path for its use."""

    folder: str
    key: str
    link: str

    @property
    def directory(self) -> str:
        """The environment itself."""
        return os.path.join(self.folder, self.key)

    def complete(self) -> bool:
        """Whether it is complete."""
        return _complete(self.directory)


def make(place: Place, recipe: Recipe) -> None:
    """Create the environment if it is missing; its commands run in the current directory.

    Raises LaunchError: SetupFailed with the exit code and last lines of the failed command,
    EnvironmentNotReady.
    """
    if place.complete():
        say(f"setup: environment {place.key} already exists")
        return
    start = time.monotonic()
    try:
        unfinished = _begin(place)
        try:
            link(place.link, unfinished)
            install(place.link, recipe, {**os.environ, **activated(place.link, os.environ)})
            _finish(place, unfinished)
        finally:
            _discard([unfinished])  # unless it is finished: the sync pod may need the room
    except OSError as error:
        raise _unwritable(place, error) from error
    say(f"setup: created environment {place.key} ({time.monotonic() - start:.1f} s)")


def use(place: Place, environment: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Wait up to `seconds` for the environment; returns the variables for commands in it.

    Raises LaunchError (EnvironmentNotReady).
    """
    waits_for = f"the environment ({place.directory})"
    if not wait_until(place.complete, seconds, waits_for):
        raise LaunchError(
            "EnvironmentNotReady",
            f"{place.directory} was not ready after {seconds:.0f} s. Read the log of the"
            " setup pod.",
        )
    try:
        link(place.link, place.directory)
    except OSError as error:
        raise _unwritable(place, error) from error
    return activated(place.link, environment)


def activated(directory: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `bin/activate` of a virtual environment sets."""
    path = environment.get("PATH") or os.defpath
    return {
        "VIRTUAL_ENV": directory,
        ENV_DIR: directory,
        "PATH": os.pathsep.join([os.path.join(directory, "bin"), path]),
    }


def link(path: str, target: str) -> None:
    """Create or replace the link `path` to `target`. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fresh = f"{path}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    os.symlink(target, fresh)
    os.replace(fresh, path)


def _begin(place: Place) -> str:
    os.makedirs(place.folder, exist_ok=True)
    _discard(os.path.join(place.folder, name) for name in _names(place) if _is_unfinished(name))
    unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=place.folder)
    os.chmod(unfinished, 0o755)  # noqa: S103  # workers may run as another user
    with open(os.path.join(unfinished, UNFINISHED_MARKER), "x"):
        pass
    return unfinished


def _finish(place: Place, unfinished: str) -> None:
    unfinished_marker = os.path.join(unfinished, UNFINISHED_MARKER)
    with open(unfinished_marker, "r+") as marker:
        json.dump({"key": place.key, "time": timestamp()}, marker)
    _flush(unfinished)
    os.rename(unfinished_marker, os.path.join(unfinished, MARKER))
    try:
        os.rename(unfinished, place.directory)
    except OSError:
        # Another pod was faster, or the directory is not an environment.
        if not place.complete():
            shutil.rmtree(place.directory)
            os.rename(unfinished, place.directory)
    link(place.link, place.directory)
    others = [os.path.join(place.folder, name) for name in _names(place) if name != place.key]
    idle = sorted(filter(_complete, others), key=_age, reverse=True)
    _discard(idle[_MAX_ENVIRONMENTS - 1 :])


def _names(place: Place) -> list[str]:
    return sorted(os.listdir(place.folder))


def _is_unfinished(name: str) -> bool:
    return name.startswith(_UNFINISHED)


def _complete(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, MARKER))


def _age(directory: str) -> float:
    return os.stat(os.path.join(directory, MARKER)).st_mtime


def _discard(directories: Iterable[str]) -> None:
    """Remove directories. Those of another user remain and only use space."""
    for directory in directories:
        for marker in (MARKER, UNFINISHED_MARKER):
            with suppress(OSError):
                os.unlink(os.path.join(directory, marker))
        shutil.rmtree(directory, ignore_errors=True)


def _flush(directory: str) -> None:
    """Flush the file system, so that the marker is not on disk before its environment."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    except (OSError, AttributeError):  # a libc without it
        os.sync()
    finally:
        os.close(descriptor)


def _unwritable(place: Place, error: OSError) -> LaunchError:
    message = f"Cannot write the environment at {place.folder}: {error}."
    return LaunchError("EnvironmentNotReady", message)
