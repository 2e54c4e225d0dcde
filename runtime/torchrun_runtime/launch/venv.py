"""The job's Python environment, into which `requirements` and `setupCommand` are installed once.

It is a virtual environment on top of the packages of the image, so torch need not be installed
again and the image need not be writable. Environments are in one folder, usually `env/` of the
workspace PVC, named by a digest of their content:

    <key>/       a complete environment, with its marker .complete
    .new-*/      an unfinished one; renamed when it is complete, else discarded

A virtual environment contains its path in many files. Therefore it is always used through a link
with the same path in every pod, wherever the folder is mounted.

First pip installs the requirements, then setupCommand runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import Iterable, Mapping, NamedTuple

from .cause import LaunchError
from .command import SHELL
from .contract import ENV_DIR, NOT_FOUND, SETUP_FAILED
from .output import say, timestamp, wait_until
from .torchrun import python

MARKER = ".complete"
# The marker of an unfinished environment. A later setup pod removes it with the environment. Then
# an earlier pod that still runs on a lost machine cannot finish its environment.
UNFINISHED_MARKER = ".unfinished"
_UNFINISHED = ".new-"
_MAX_ENVIRONMENTS = 2  # the current one and the previous one, which a gang may still use
_TAIL_BYTES = 4096
_TAIL_LINES = 4
_PROBE_SECONDS = 300  # the first import from a network file system may be slow
_POLL = 1.0  # seconds between two polls of a command without output

_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
# If the image's python is in a virtual environment, "system" would be the packages below it.
_IMAGE_PACKAGES = """
import site, sys
if sys.prefix != sys.base_prefix:
    for directory in site.getsitepackages():
        print("import site; site.addsitedir(%r)" % directory)
"""
# The image's pip would install into the image.
_PIP = '#!/bin/sh\nexec "$VIRTUAL_ENV/bin/python" -m pip "$@"\n'
_PIP_DEFAULTS = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
}
_REDIRECTING = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONHOME")


class EnvironmentPaths(NamedTuple):
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


def make(place: EnvironmentPaths, recipe: Recipe) -> None:
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


def use(place: EnvironmentPaths, environment: Mapping[str, str], seconds: float) -> dict[str, str]:
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


def _begin(place: EnvironmentPaths) -> str:
    os.makedirs(place.folder, exist_ok=True)
    _discard(
        os.path.join(place.folder, name) for name in _names(place) if name.startswith(_UNFINISHED)
    )
    unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=place.folder)
    os.chmod(unfinished, 0o755)  # noqa: S103  # workers may run as another user
    with open(os.path.join(unfinished, UNFINISHED_MARKER), "x"):
        pass
    return unfinished


def _finish(place: EnvironmentPaths, unfinished: str) -> None:
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


def _names(place: EnvironmentPaths) -> list[str]:
    return sorted(os.listdir(place.folder))


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


def _unwritable(place: EnvironmentPaths, error: OSError) -> LaunchError:
    message = f"Cannot write the environment at {place.folder}: {error}."
    return LaunchError("EnvironmentNotReady", message)


class Recipe(NamedTuple):
    """The content of an environment. command: shell line, argument vector, or "" for none."""

    requirements: tuple[str, ...]
    command: str | list[str]


def install(directory: str, recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Create an environment in `directory`, which exists and is empty, and install into it.

    environment: variables of the commands, with the environment activated.
    Raises LaunchError (SetupFailed), OSError if `directory` cannot be written.
    """
    variables = {**_PIP_DEFAULTS, **environment}
    for name in _REDIRECTING:
        variables.pop(name, None)
    base, inside = python(), os.path.join(directory, "bin", "python")
    _make_venv(base, directory, variables)
    if recipe.requirements and not _has_pip(inside, variables):
        raise LaunchError(
            "SetupFailed",
            f"spec.requirements needs pip, which {base} of this image does not have. Use an image"
            " with pip, or install with setupCommand.",
            exit_code=SETUP_FAILED,
        )
    if recipe.requirements:
        argv = [inside, "-m", "pip", "install", *_arguments(recipe.requirements)]
        _run("pip install of spec.requirements", argv, variables)
    if recipe.command:
        line = recipe.command
        argv = [SHELL, "-c", line] if isinstance(line, str) else line
        _run("setupCommand", argv, variables)


def _make_venv(base: str, directory: str, variables: Mapping[str, str]) -> None:
    """Run `python -m venv`, which follows no links, and add the pip of the image."""
    real = os.path.realpath(directory)
    options = ["--system-site-packages", "--without-pip"]
    _run("python -m venv", [base, "-m", "venv", *options, real], variables)
    programs = os.path.join(directory, "bin")
    for name in os.listdir(programs):
        if name.lower().startswith("activate"):
            _rewrite(os.path.join(programs, name), real, directory)
    for name in ("pip", "pip3"):
        path = os.path.join(programs, name)
        _write(path, _PIP)
        os.chmod(path, 0o755)  # noqa: S103  # a program
    packages = _ask(os.path.join(programs, "python"), _SITE_PACKAGES, variables)
    image = _ask(base, _IMAGE_PACKAGES, variables)
    _write(os.path.join(packages, "_torchrun_image.pth"), image + "\n")


def _rewrite(path: str, old: str, new: str) -> None:
    with open(path) as file:
        text = file.read()
    _write(path, text.replace(old, new))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _has_pip(inside: str, variables: Mapping[str, str]) -> bool:
    """Whether the image's python has pip."""
    probe = [inside, "-c", "import pip"]
    process = subprocess.run(probe, env=variables, stderr=subprocess.DEVNULL, check=False)
    return process.returncode == 0


def _arguments(requirements: tuple[str, ...]) -> list[str]:
    """Arguments for pip: an option is split into words, anything else is one requirement."""
    try:
        return [
            word
            for entry in requirements
            for word in (shlex.split(entry) if entry.startswith("-") else [entry])
        ]
    except ValueError as error:
        message = f"An option in spec.requirements cannot be split into words: {error}."
        raise LaunchError("SetupFailed", message, exit_code=SETUP_FAILED) from error


def _ask(interpreter: str, code: str, variables: Mapping[str, str]) -> str:
    """The output of a line of Python in this interpreter."""
    try:
        return (
            subprocess.run(
                [interpreter, "-c", code],
                env=variables,
                stdout=subprocess.PIPE,
                check=True,
                timeout=_PROBE_SECONDS,
            )
            .stdout.decode()
            .strip()
        )
    except (OSError, subprocess.SubprocessError) as error:
        message = f"Cannot run {interpreter} of this image: {error}."
        raise LaunchError("SetupFailed", message, exit_code=SETUP_FAILED) from error


def _run(what: str, argv: list[str], variables: Mapping[str, str]) -> None:
    """Run to the end and copy the output. Raises LaunchError with its last lines if it fails."""
    say(f"setup: {what}")
    try:
        process = subprocess.Popen(
            argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        message = f"Cannot start {what}: {argv[0]}: {error.strerror}."
        raise LaunchError("SetupFailed", message, exit_code=NOT_FOUND) from error
    tail = _pass_on(process)
    code = process.wait()
    if code:
        code = 128 - code if code < 0 else code
        words = f"{what} ended with exit code {code}"
        last = " | ".join(_last_lines(tail))
        raise LaunchError("SetupFailed", f"{words}: {last}" if last else words, exit_code=code)


def _pass_on(process: subprocess.Popen[bytes]) -> bytes:
    """Copy its output until it ends; returns the last bytes.

    Its child processes may keep the pipe open forever, so only the end of the process counts.
    """
    assert process.stdout
    pipe = process.stdout.fileno()
    tail = b""
    with process.stdout:
        while True:
            has_ended = process.poll() is not None
            if select.select([pipe], [], [], 0 if has_ended else _POLL)[0]:
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    return tail
                tail = (tail + piece)[-_TAIL_BYTES:]
                os.write(1, piece)
            elif has_ended:
                return tail


def _last_lines(output: bytes) -> list[str]:
    """The last lines that are not empty; a carriage return (progress bar) ends a line too."""
    text = output.decode("utf-8", "replace").replace("\r", "\n")
    lines = [line.strip() for line in text.split("\n")]
    return [line for line in lines if line][-_TAIL_LINES:]
