"""How to run the user's command: under torchrun, or unchanged. Pure.

A python command runs under torchrun. What stands around it in its shell line runs once for each
node, outside of torchrun: `cd src && uv run python train.py 2>&1 | tee log` becomes
`cd src && uv run python -m torch.distributed.run --no-python SHELL -c "exec python train.py" 2>&1 |
tee log`. The command itself remains a shell line: the shell expands it once in every rank, so
`--rank $RANK` has the value of that rank.

A command that starts ranks itself runs unchanged: otherwise each of N processes would start N more.
So does a shell line that is more than one command, because only its author knows which part is to
run in every rank.
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
_EXPANDS = re.compile(r"[$`*?\[~{]")
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_LAUNCHER = re.compile(r"(?:^|[\s/(`])(torchrun|accelerate|deepspeed)(?:$|[\s)`])")
_MODULE = re.compile(
    r"-[^cmWX-]*m ?((?:torch\.distributed\.(?:run|launch)|accelerate|deepspeed)(?:\.\S*)?)$"
)
# In the arguments of a program, such as a debugger that runs a launcher: no name of a strategy.
_LAUNCHER_PATH = re.compile(r"(?:/bin/|\(which )(torchrun|accelerate|deepspeed)\)?$")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SIMPLE_COMMAND = re.compile(rf"(?:{_QUOTED}|[^;&|<>()`\n'\"\\])+")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
# Parts of a line around its command.
_WORD = rf"(?:{_QUOTED}|[^\s'\"\\;&|<>()`#])+"
# What stands before the command may have `cd`, or an option such as --directory.
_CHANGES_DIRECTORY = re.compile(r"(?:^|\s)(?:cd\s|-)")
_CD = re.compile(rf"cd[ \t]+{_WORD}[ \t]*&&\s*")
_REDIRECTIONS = rf"(?:[ \t]*\d*(?:>>?|<)[ \t]*(?:&\d|{_WORD}))*"
_AFTER = re.compile(rf"{_REDIRECTIONS}(?:[ \t]*\|[ \t]*tee(?:[ \t]+{_WORD})*{_REDIRECTIONS})?\s*")
_AFTER_STARTS = re.compile(rf"(?:{_QUOTED})|(?P<after>(?<!\S)\d*[<>]|[;&|<>()`\n])")
# Options with a value of programs that run a script without `python` before it.
_UV_OPTIONS = frozenset(
    ("--with", "--with-requirements", "--extra", "--group", "--python", "-p", "--project")
)
# Programs that run another one, by whether they choose the environment of its packages.
_WRAPPERS = {
    **dict.fromkeys(("uv", "poetry", "pdm", "pipenv", "hatch", "rye", "pixi", "conda"), True),
    **dict.fromkeys(("micromamba", "mamba"), True),
    **dict.fromkeys(("nsys", "ncu", "numactl", "time", "stdbuf", "nice", "ionice"), False),
    **dict.fromkeys(("taskset", "env", "exec", "command"), False),
}
_PROGRAM = re.compile(r"[\w./+-]+")
# Of shells; those that exist as programs, too, are left out.
_BUILTIN = re.compile(
    r"\.|alias|bg|break|cd|command|continue|declare|eval|exec|exit|export|fc|fg|getopts|hash|jobs|let"
    r"|local|read|readonly|return|set|shift|source|times?|trap|type|typeset|ulimit|umask|unalias"
    r"|unset|wait"
)
_DOTTED_MODULE = re.compile(
    r"-m (torch\.distributed\.(?:run|launch)|(?:accelerate|deepspeed)\.\S+)$"
)


class Run(NamedTuple):
    """argv: what to start, in each rank where under_torchrun.

    interpreter: the python of the command, "" if it has none. why: text for the log. before, after:
    the rest of the shell line, which runs once for each node. in_environment: `before` selects the
    environment that has torch, as `uv run` does. starts_ranks: the command is a launcher.
    as_it_is: the unchanged command, which runs instead if there is no torch; empty for a plain
    python command, which then fails. script: the file that python gets, from the working
    directory; "" if that is not certain.
    """

    argv: list[str]
    under_torchrun: bool
    why: str
    interpreter: str = ""
    before: str = ""
    after: str = ""
    in_environment: bool = False
    starts_ranks: bool = False
    as_it_is: tuple[str, ...] = ()
    script: str = ""


class _Parsed(NamedTuple):
    """A parsed command. assignments, rest: parts of a shell line; operator: its first operator."""

    words: list[str]
    assignments: str = ""
    rest: str = ""
    operator: str = ""


class _Line(NamedTuple):
    """A shell line with one command: what stands before it, the command, what follows it."""

    before: str
    command: str
    after: str
    in_environment: bool


class _Starts(NamedTuple):
    """A launcher that the command runs, and its options: words up to the script."""

    launcher: str
    options: list[str]


def decide(command: str | list[str], launcher: str, nnodes: str, python: str) -> Run:
    """Decide how to run `command`.

    launcher: auto, torchrun or none. nnodes: PET_NNODES, "2" or "1:4", "" if unknown.
    python: interpreter for a command that is a .py file.
    Raises LaunchError (InvalidCommand) if the command contradicts itself or the job.
    """
    parsed = _parse(command) if isinstance(command, str) else _Parsed(command)
    line = _split(command) if isinstance(command, str) else None
    starts = _starts_ranks(command, line)
    if starts:
        _check_nodes(starts.options, nnodes)
    as_it_is = [SHELL, "-c", command] if isinstance(command, str) else list(command)
    if launcher == "none":
        return Run(as_it_is, False, "spec.launcher is none")
    if launcher == "torchrun" and starts:
        raise LaunchError(
            "InvalidCommand",
            f"spec.launcher is torchrun, but the command starts {starts.launcher} itself, so every"
            " rank would start all ranks again. Set launcher to auto, or remove"
            f" {starts.launcher}.",
        )
    obstacle = _obstacle(parsed, starts.launcher if starts else "")
    if not obstacle:
        return _in_each_rank(command, parsed, python)
    if launcher == "torchrun":
        return Run(as_it_is, True, "spec.launcher is torchrun")
    if line is not None and not starts:
        inner = _in_each_rank(line.command, _parse(line.command), python)
        return inner._replace(
            why="it is one python command in a shell line",
            before=line.before,
            after=line.after,
            in_environment=line.in_environment,
            as_it_is=tuple(as_it_is),
            script="" if _CHANGES_DIRECTORY.search(line.before) else inner.script,
        )
    if isinstance(command, str) and not starts and _expands_one_command(command):
        # Which part of the line the values belong to is not certain, so each rank runs all of it.
        why = "it is one python command with values of other commands"
        return Run(as_it_is, True, why, as_it_is=tuple(as_it_is))
    return Run(as_it_is, False, obstacle, starts_ranks=starts is not None)


def only_program(line: str) -> str:
    """The program of a shell line that runs nothing else; "" for other lines."""
    parsed = _parse(line)
    first = parsed.words[0] if parsed.words else ""
    is_program = _PROGRAM.fullmatch(first) and not _BUILTIN.fullmatch(first)
    return first if is_program and not (parsed.operator or parsed.assignments) else ""


def _in_each_rank(command: str | list[str], parsed: _Parsed, python: str) -> Run:
    why = "it is a plain python command"
    script = parsed.words[0].endswith(".py")
    interpreter = python if script else parsed.words[0]
    if isinstance(command, list):
        argv = [python, *command] if script else list(command)
        return Run(argv, True, why, interpreter, script=_script(parsed.words))
    line = f"{shlex.quote(python)} {parsed.rest}" if script else parsed.rest
    # exec: the rank is the python process itself and gets the signals. env: accepts the
    # assignments, which exec does not.
    line = f"exec env {parsed.assignments}{line}" if parsed.assignments else f"exec {line}"
    return Run([SHELL, "-c", line], True, why, interpreter, script=_script(parsed.words))


def _script(words: list[str]) -> str:
    """The file of a python command; "" for a module, code, or what a shell may expand."""
    end = _end_of_program(words)
    option = _PYTHON_OPTION.match(words[end - 2]) if end > 1 else None
    script = "" if option and option.group(1) in ("c", "m") else words[end - 1]
    return script if script.endswith(".py") and not _EXPANDS.search(script) else ""


def _split(line: str) -> _Line | None:
    """Split a line with one python command from what stands around it; None for other lines."""
    line = line.strip()
    at, in_environment = 0, False
    while True:
        match = _CD.match(line, at) or _ASSIGNMENTS.match(line, at)
        if match is None or match.end() == at:
            break
        at = match.end()
    starts = (match.start("after") for match in _AFTER_STARTS.finditer(line, at) if match["after"])
    end = next(starts, len(line))
    if not _AFTER.fullmatch(line, end):
        return None
    command = line[at:end].rstrip()
    if command != line[at:end]:
        end = at + len(command)
    if "#" in _QUOTED_OR_COMMENT.sub(lambda match: "" if match.group(1) else "#", command):
        return None
    first = re.match(rf"{_WORD}", command)
    if first is None:
        return None
    name = os.path.basename(first.group())
    if name in _WRAPPERS:
        program = _first_python(command)
        if program is None:
            return None
        in_environment = _WRAPPERS[name]
        at, command = at + program, command[program:]
    if not _is_python(command.split(None, 1)[0]):
        return None
    return _Line(line[:at], command, line[end:], in_environment)


def _expands_one_command(line: str) -> bool:
    """Whether a line would be one python command if the output of others stood in it."""
    plain = _SUBSTITUTION.sub("x", line)
    return plain != line and _split(plain) is not None


def _first_python(command: str) -> int | None:
    """Where the python command starts that a wrapper runs; None if that is not certain.

    A wrapper may have options with values before `python`. A script without `python` before it may
    be the argument of another program, so it counts only after options that are known.
    """
    is_known, before = True, ""
    for number, match in enumerate(re.finditer(_WORD, command)):
        word = match.group()
        if _LAUNCHER.search(word):
            return None
        if number and _PYTHON.fullmatch(os.path.basename(word)):
            return match.start()
        is_script = number > 0 and word.endswith(".py") and not word.startswith("-")
        if is_script and before not in _UV_OPTIONS:
            return match.start() if is_known else None
        is_subcommand = number == 1 and word == "run"
        if number and not (word.startswith("-") or is_subcommand or before in _UV_OPTIONS):
            is_known = False
        before = word
    return None


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


def _starts_ranks(command: str | list[str], line: _Line | None) -> _Starts | None:
    """The launcher that the command runs; None if it runs none.

    The arguments of a program may have the name of a launcher, as in --strategy deepspeed.
    """
    if isinstance(command, list):
        commands = [command]
    elif line is not None:
        commands = [_split_words(line.command)]
    else:
        code = _QUOTED_OR_COMMENT.sub(lambda match: match.group(1) or "", command)
        commands = [_split_words(part) for part in _SIMPLE_COMMAND.findall(code)]
    found = (_starts_in(words) for words in commands)
    return next((starts for starts in found if starts), None)


def _starts_in(words: list[str]) -> _Starts | None:
    """The launcher of a command without operators."""
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if not words or not _is_python(words[0]):
        return _find(words, _LAUNCHER, _MODULE)
    end = _end_of_program(words)
    return _find(words[:end], _LAUNCHER, _MODULE, words[end:]) or _find(
        words[end:], _LAUNCHER_PATH, _DOTTED_MODULE
    )


def _find(
    words: list[str],
    program: re.Pattern[str],
    module: re.Pattern[str],
    following: list[str] | None = None,
) -> _Starts | None:
    for at, (before, word) in enumerate(zip(["", *words], words), 1):
        match = module.match(word) or module.match(f"{before} {word}")
        if not match and not before.startswith("--"):  # the value of an option
            match = program.search(word)
        if match:
            options = [*words[at:], *(following or ())]
            scripts = (n for n, option in enumerate(options) if option.endswith(".py"))
            return _Starts(match.group(1), options[: next(scripts, len(options))])
    return None


def _split_words(command: str) -> list[str]:
    try:
        return shlex.split(command.replace("\\\n", ""))
    except ValueError:  # a here-document may have single quotes; the shell knows
        return command.split()


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
