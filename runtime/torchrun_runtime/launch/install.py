"""Install into a virtual environment: first requirements, with pip, then setupCommand."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
from typing import Mapping, NamedTuple

from .command import SHELL
from .contract import NOT_FOUND, SETUP_FAILED
from .errors import LaunchError
from .output import say
from .torchrun import python

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
