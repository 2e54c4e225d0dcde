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

from .cause import LaunchError

SHELL = "/bin/sh"
_PYTHON = re.compile(r"python(3(\.\d+)?t?)?")
_QUOTED = r"\\(?:.|\n)|'[^']*'|\"(?:\\(?:.|\n)|[^\"\\])*\""
_COMMENT = r"(?<![^\s;&|()<>])#[^\n]*"
_QUOTED_OR_COMMENT = re.compile(rf"({_QUOTED})|{_COMMENT}")
_OPERATOR = re.compile(r"[;&|<>()`\n]+")
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
_CD = rf"cd[ \t]+{_WORD}[ \t]*&&\s*"
_ASSIGN = rf"[A-Za-z_]\w*=(?:{_QUOTED}|[^\s'\"\\;&|<>()`])*[ \t]+"
_BEFORE = re.compile(rf"(?:{_CD}|{_ASSIGN})*")
_REDIRECTIONS = rf"(?:[ \t]*\d*(?:>>?|<)[ \t]*(?:&\d|{_WORD}))*"
_AFTER = re.compile(rf"{_REDIRECTIONS}(?:[ \t]*\|[ \t]*tee(?:[ \t]+{_WORD})*{_REDIRECTIONS})?\s*")
_BLANK_END = re.compile(r"(?:\s|\\\n)+\Z")
_AFTER_STARTS = re.compile(rf"(?:{_QUOTED})|(?:{_COMMENT})|(?P<after>(?<!\S)\d*[<>]|[;&|<>()`\n])")
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


class _Line(NamedTuple):
    """A shell line around one command: what stands before it, the command, what follows it.

    operator: the first one of the line; "" if all of it is a simple command, or if it is known that
    the command is the only one. in_environment: see Run.
    """

    before: str
    command: str
    after: str
    operator: str
    in_environment: bool = False


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
    line = command if isinstance(command, list) else _parse(command)
    if isinstance(line, _Line):
        _check_complete(line)
    python_line = _around_python(line) if isinstance(line, _Line) else None
    starts = _starts_ranks(command, python_line)
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
    obstacle = _obstacle(line, starts.launcher if starts else "")
    if not obstacle:
        return _in_each_rank(line, python)
    if launcher == "torchrun":
        return Run(as_it_is, True, "spec.launcher is torchrun")
    if python_line is not None and not starts:
        _check_complete(python_line)
        inner = _in_each_rank(python_line._replace(before=""), python)
        return inner._replace(
            why="it is one python command in a shell line",
            before=python_line.before,
            after=python_line.after,
            in_environment=python_line.in_environment,
            as_it_is=tuple(as_it_is),
            script="" if _CHANGES_DIRECTORY.search(python_line.before) else inner.script,
        )
    if isinstance(command, str) and not starts and _expands_one_command(command):
        # Which part of the line the values belong to is not certain, so each rank runs all of it.
        why = "it is one python command with values of other commands"
        return Run(as_it_is, True, why, as_it_is=tuple(as_it_is))
    return Run(as_it_is, False, obstacle, starts_ranks=starts is not None)


def only_program(line: str) -> str:
    """The program of a shell line that runs nothing else; "" for other lines."""
    parsed = _parse(line)
    first = next(iter(_words_of(parsed)), "")
    is_program = _PROGRAM.fullmatch(first) and not _BUILTIN.fullmatch(first)
    return first if is_program and not (parsed.operator or parsed.before) else ""


def _in_each_rank(line: list[str] | _Line, python: str) -> Run:
    why = "it is a plain python command"
    words = _words_of(line)
    first = words[0]
    script = first.endswith(".py")
    interpreter = python if script else first
    if isinstance(line, list):
        argv = [python, *line] if script else list(line)
        return Run(argv, True, why, interpreter, script=_script(words))
    command = f"{shlex.quote(python)} {line.command}" if script else line.command
    # exec: the rank is the python process itself and gets the signals. env: accepts the
    # assignments, which exec does not.
    command = f"exec env {line.before}{command}" if line.before else f"exec {command}"
    return Run([SHELL, "-c", command], True, why, interpreter, script=_script(words))


def _script(words: list[str]) -> str:
    """The file of a python command; "" for a module, code, or what a shell may expand."""
    end = _end_of_program(words)
    option = _PYTHON_OPTION.match(words[end - 2]) if end > 1 else None
    script = "" if option and option.group(1) in ("c", "m") else words[end - 1]
    return script if script.endswith(".py") and not _EXPANDS.search(script) else ""


def _parse(line: str) -> _Line:
    """Split a shell line around its first command. `cd` and assignments may stand before it."""
    line = line.strip()
    before = _BEFORE.match(line)
    at = before.end() if before else 0
    starts = (match.start("after") for match in _AFTER_STARTS.finditer(line, at) if match["after"])
    command = _BLANK_END.sub("", line[at : next(starts, len(line))])
    operator = _OPERATOR.search(_QUOTED_OR_COMMENT.sub("", line))
    after = line[at + len(command) :]
    return _Line(line[:at], command, after, operator.group() if operator else "")


def _around_python(line: _Line) -> _Line | None:
    """The line around its python command, which a wrapper may run; None if there are others."""
    command = line.command
    first = re.match(_WORD, command)
    may_have_comment = "#" in re.sub(_QUOTED, "", command)
    if first is None or may_have_comment or not _AFTER.fullmatch(line.after.replace("\\\n", " ")):
        return None
    name = os.path.basename(first.group())
    before, in_environment = line.before, False
    if name in _WRAPPERS:
        at = _first_python(command)
        if at is None:
            return None
        before, command = before + command[:at], command[at:]
        in_environment = _WRAPPERS[name]
    if not _is_python(command.split(None, 1)[0]):
        return None
    return _Line(before, command, line.after, "", in_environment)


def _expands_one_command(line: str) -> bool:
    """Whether a line would be one python command if the output of others stood in it."""
    plain = _SUBSTITUTION.sub("x", line)
    return plain != line and _around_python(_parse(plain)) is not None


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


def _check_complete(line: _Line) -> None:
    """Raise LaunchError if quotes are not closed in a line with one command."""
    try:
        shlex.split(_without_comments(line.command).replace("\\\n", ""))
    except ValueError as error:
        if line.operator:  # a here-document may have single quotes; the shell knows
            return
        text = line.before + line.command + line.after
        raise LaunchError(
            "InvalidCommand", f"The command is not a complete shell line ({error}): {text!r}."
        ) from error


def _obstacle(line: list[str] | _Line, starts: str) -> str:
    """The reason why this is not a plain python command; "" if it is one."""
    if starts:
        return f"it starts {starts} itself"
    if isinstance(line, _Line) and line.operator:
        return f"it is a shell line with {line.operator!r}"
    words = _words_of(line)
    if not words:
        return "it names no program"
    if _is_python(words[0]):
        return ""
    return f"its first word is {words[0]!r}, not python or a .py file"


def _is_python(word: str) -> bool:
    return bool(_PYTHON.fullmatch(os.path.basename(word))) or word.endswith(".py")


def _starts_ranks(command: str | list[str], line: _Line | None) -> _Starts | None:
    """The launcher that the command runs; None if it runs none.

    The arguments of a program may have the name of a launcher, as in --strategy deepspeed.
    """
    if isinstance(command, list):
        commands = [command]
    elif line is not None:
        commands = [_words_of(line)]
    else:
        parts = _SIMPLE_COMMAND.findall(_without_comments(command))
        commands = [_split_words(part) for part in parts]
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


def _words_of(line: list[str] | _Line) -> list[str]:
    """The words of the command."""
    return line if isinstance(line, list) else _split_words(_without_comments(line.command))


def _split_words(command: str) -> list[str]:
    command = command.replace("\\\n", "")
    try:
        return shlex.split(command)
    except ValueError:  # a here-document may have single quotes; the shell knows
        return command.split()


def _without_comments(line: str) -> str:
    return _QUOTED_OR_COMMENT.sub(lambda match: match.group(1) or "", line)


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
