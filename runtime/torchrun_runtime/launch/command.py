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
_QUOTED_OR_COMMENT = re.compile(rf"({_QUOTED})|(?<![^\s;&|()<>])#[^\n]*")
_OPERATOR = re.compile(r"[;&|<>()`\n]+")
_ASSIGNMENTS = re.compile(rf"(?:[A-Za-z_]\w*=(?:{_QUOTED}|[^\s'\"\\;&|<>()`])*[ \t]+)*")
# An option of python: the last letter of several has a value, in the same word or the next one.
_PYTHON_OPTION = re.compile(r"-[^cmWX-]*([cmWX]?)(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_LAUNCHER = re.compile(r"(?:^|[\s/(`])(torchrun|accelerate|deepspeed)(?:$|[\s)`])")
_MODULE = re.compile(
    r"-[^cmWX-]*m ?((?:torch\.distributed\.(?:run|launch)|accelerate|deepspeed)(?:\.\S*)?)$"
)
# In the arguments of a program, such as a debugger that runs a launcher: no name of a strategy.
_LAUNCHER_PATH = re.compile(r"(?:/bin/|\(which )(torchrun|accelerate|deepspeed)\)?$")
_DOTTED_MODULE = re.compile(
    r"-m (torch\.distributed\.(?:run|launch)|(?:accelerate|deepspeed)\.\S+)$"
)


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
    starts = _starts_ranks(parsed)
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
    operator = _OPERATOR.search(_QUOTED_OR_COMMENT.sub("", line))
    code = _QUOTED_OR_COMMENT.sub(lambda match: match.group(1) or "", rest)
    try:
        words = shlex.split(code.replace("\\\n", ""))
    except ValueError as error:
        if operator is None:
            raise LaunchError(
                "InvalidCommand", f"The command is not a complete shell line ({error}): {line!r}."
            ) from error
        words = code.split()  # a here-document may have single quotes; the shell knows
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
    if _is_python(first):
        return ""
    return f"its first word is {first!r}, not python or a .py file"


def _is_python(word: str) -> bool:
    return bool(_PYTHON.fullmatch(os.path.basename(word))) or word.endswith(".py")


def _starts_ranks(parsed: _Parsed) -> str:
    """The launcher that the command runs; "" for none.

    The arguments of a python program may have the name of a launcher, as in --strategy deepspeed.
    """
    words = parsed.words
    if parsed.operator or not words or not _is_python(words[0]):
        return _find(words, _LAUNCHER, _MODULE)
    end = _end_of_program(words)
    return _find(words[:end], _LAUNCHER, _MODULE) or _find(
        words[end:], _LAUNCHER_PATH, _DOTTED_MODULE
    )


def _find(words: list[str], program: re.Pattern[str], module: re.Pattern[str]) -> str:
    for before, word in zip(["", *words], words):
        match = program.search(word) or module.match(word) or module.match(f"{before} {word}")
        if match:
            return match.group(1)
    return ""


def _end_of_program(words: list[str]) -> int:
    """The number of words of a python command up to its program, which gets all others."""
    if words[0].endswith(".py"):
        return 1
    is_value = False
    for number, word in enumerate(words[1:], 2):
        option = _PYTHON_OPTION.match(word)
        if is_value:
            is_value = False
        elif option:
            letter, value = option.groups()
            if letter in ("c", "m"):
                return number if value else number + 1
            is_value = word == "--check-hash-based-pycs" or bool(letter and not value)
        elif not _VARIABLE.fullmatch(word):  # a variable may have options
            return number
    return len(words)


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
