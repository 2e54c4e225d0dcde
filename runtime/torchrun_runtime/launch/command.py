"""How to run the user's command: under torchrun, or unchanged. Pure.

A plain `python train.py` runs under torchrun. A command that starts ranks itself runs unchanged:
otherwise each of N processes would start N more. A shell line remains a shell line: the shell
expands it once in every rank, so `--rank $RANK` has the value of that rank.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import NamedTuple

from .errors import LaunchError

SHELL = "/bin/sh"
_PYTHON = re.compile(r"python(3(\.\d+)?t?)?")
_QUOTED = r"\\(?:.|\n)|'[^']*'|\"(?:\\(?:.|\n)|[^\"\\])*\""
_OPERATOR = re.compile(r"[;&|<>()`\n]+")
_ASSIGNMENTS = re.compile(rf"(?:[A-Za-z_]\w*=(?:{_QUOTED}|[^\s'\"\\;&|<>()`])*[ \t]+)*")
_LAUNCHER = re.compile(r"(?:^|[\s/(`])(torchrun|accelerate|deepspeed)(?:$|[\s)`])")
_LAUNCHER_MODULE = re.compile(r"(torch\.distributed\.(run|launch)|accelerate|deepspeed)(\.|$)")


class Run(NamedTuple):
    """argv: what to start, in each rank where under_torchrun.

    interpreter: the python of the command, "" if it has none. why: text for the log.
    """

    argv: list[str]
    under_torchrun: bool
    why: str
    interpreter: str = ""


class _Parsed(NamedTuple):
    """A parsed command. assignments, rest: parts of a shell line; operator: its first operator."""

    words: list[str]
    assignments: str = ""
    rest: str = ""
    operator: str = ""


def decide(command: str | list[str], launcher: str, nnodes: str, python: str) -> Run:
    """Decide how to run `command`.

    launcher: auto, torchrun or none. nnodes: PET_NNODES, "2" or "1:4", "" if unknown.
    python: interpreter for a command that is a .py file.
    Raises LaunchError (InvalidCommand) if the command contradicts itself or the job.
    """
    parsed = _parse(command) if isinstance(command, str) else _Parsed(command)
    starts = _starts_ranks(parsed.words)
    if starts:
        _check_nodes(parsed.words, nnodes)
    as_it_is = [SHELL, "-c", command] if isinstance(command, str) else list(command)
    if launcher == "none":
        return Run(as_it_is, False, "spec.launcher is none")
    if launcher == "torchrun" and starts:
        raise LaunchError(
            "InvalidCommand",
            f"spec.launcher is torchrun, but the command starts {starts} itself, so every rank"
            f" would start all ranks again. Set launcher to auto, or remove {starts}.",
        )
    obstacle = _obstacle(parsed, starts)
    if not obstacle:
        return _in_each_rank(command, parsed, python)
    if launcher == "torchrun":
        return Run(as_it_is, True, "spec.launcher is torchrun")
    return Run(as_it_is, False, obstacle)


def _in_each_rank(command: str | list[str], parsed: _Parsed, python: str) -> Run:
    why = "it is a plain python command"
    script = parsed.words[0].endswith(".py")
    interpreter = python if script else parsed.words[0]
    if isinstance(command, list):
        return Run([python, *command] if script else list(command), True, why, interpreter)
    line = f"{shlex.quote(python)} {parsed.rest}" if script else parsed.rest
    # exec: the rank is the python process itself and gets the signals. env: accepts the
    # assignments, which exec does not.
    line = f"exec env {parsed.assignments}{line}" if parsed.assignments else f"exec {line}"
    return Run([SHELL, "-c", line], True, why, interpreter)


def _parse(line: str) -> _Parsed:
    line = line.strip()
    match = _ASSIGNMENTS.match(line)
    end = match.end() if match else 0
    rest = line[end:]
    operator = _OPERATOR.search(re.sub(_QUOTED, "", line))
    try:
        words = shlex.split(rest.replace("\\\n", ""))
    except ValueError as error:
        raise LaunchError(
            "InvalidCommand", f"The command is not a complete shell line ({error}): {line!r}."
        ) from error
    return _Parsed(words, line[:end], rest, operator.group() if operator else "")


def _obstacle(parsed: _Parsed, starts: str) -> str:
    """The reason why this is not a plain python command; "" if it is one."""
    if starts:
        return f"it starts {starts} itself"
    if parsed.operator:
        return f"it is a shell line with {parsed.operator!r}"
    if not parsed.words:
        return "it names no program"
    first = parsed.words[0]
    if _PYTHON.fullmatch(os.path.basename(first)) or first.endswith(".py"):
        return ""
    return f"its first word is {first!r}, not python or a .py file"


def _starts_ranks(words: list[str]) -> str:
    """The word of the command that starts ranks; "" for none."""
    for before, word in zip(["", *words], words):
        match = _LAUNCHER.search(word)
        if match:
            return match.group(1)
        if before == "-m" and _LAUNCHER_MODULE.match(word):
            return word
    return ""


def _check_nodes(words: list[str], nnodes: str) -> None:
    for word, after in zip(words, [*words[1:], ""]):
        if word == "--standalone" and nnodes and _nodes(nnodes) != (1, 1):
            raise LaunchError(
                "InvalidCommand",
                f"The command has --standalone, but the job has {nnodes} nodes. Remove it: torchrun"
                " gets the number of nodes and the rendezvous from the job.",
            )
        option, separator, value = word.partition("=")
        nodes = value if separator else after
        if option == "--nnodes" and nnodes and "$" not in nodes and _nodes(nodes) != _nodes(nnodes):
            raise LaunchError(
                "InvalidCommand",
                f"The command has --nnodes={nodes}, but the job has {nnodes} nodes. Remove"
                " --nnodes: torchrun gets it from the job.",
            )


def _nodes(text: str) -> tuple[int, int] | str:
    """Smallest and largest number of nodes, as torchrun reads `2` and `1:4`."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        return text
