"""torchrun.toml: defaults of flags, in the working directory or the nearest directory above.

queue = "gpu"              # the flag --queue, of each command that has it
command = "python train.py"
[env]
LR = "0.1"
[logs]                     # flags of one command
tail = 100
"""

from collections.abc import Callable
from pathlib import Path

import click

from kubectl_torchrun.home import home
from kubectl_torchrun.text import escape

FILE = "torchrun.toml"
_IGNORED_KEY = "torchrun.no-defaults"  # in the meta of a context
_RUNS = ("submit", "run")  # the commands for which `command` outside of any table applies
# The file of a foreign repository must not choose a kubeconfig, which may start programs.
_REFUSED = {
    "kubeconfig": "Use --kubeconfig or KUBECONFIG: a kubeconfig can start programs, and the file"
    " may come from a repository",
    "trust": "It confirms the settings of this file",
    "help": "It has no default",
    "version": "It has no default",
}


def option() -> Callable[[Callable[..., None]], Callable[..., None]]:
    """--no-defaults, for a program such as the SDK, whose calls mean the same everywhere."""

    def keep(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.meta[_IGNORED_KEY] = value

    return click.option(
        "--no-defaults",
        is_flag=True,
        expose_value=False,
        callback=keep,
        help=f"Ignore {FILE}.",
    )


def find(start: Path | None = None) -> Path | None:
    """The nearest torchrun.toml at or above the directory; None also with --no-defaults."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.meta.get(_IGNORED_KEY):
        return None
    here = (start or _working_directory()).resolve()
    return next((file for at in (here, *here.parents) if (file := at / FILE).is_file()), None)


def project() -> Path:
    """The default directory to upload: that of torchrun.toml, else this one.

    A file at home or at the root has defaults for all projects. It does not make its directory a
    project.
    """
    file = find()
    if file is None or file.parent in (home().resolve(), Path(file.anchor)):
        return _working_directory()
    return file.parent


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        text = "The working directory was deleted. Change to another one."
        raise click.UsageError(text) from None


def of_command(group: click.Group, command: click.Command) -> dict[str, object]:
    """The values of the file for this command. Raises click.UsageError with invalid keys."""
    path = find()
    if path is None:
        return {}
    content = read(path)
    flags = {name: _flags(member) for name, member in group.commands.items()}
    everywhere = set().union(*flags.values())
    values: dict[str, object] = {}
    for key, value in content.items():
        if isinstance(value, dict) and key in flags:
            keys = flags[key]
            for name in value:
                _check(name, keys, f"{path}: [{key}]")
        else:
            _check(key, everywhere, str(path), [*flags])
    own = _parameters(command)
    table = content.get(command.name or "")
    own_table = table if isinstance(table, dict) else {}
    for name, value in [*content.items(), *own_table.items()]:
        parameter = own.get(name)
        if parameter is None or (isinstance(value, dict) and name in flags):
            continue
        if name == "command" and name not in own_table and command.name not in _RUNS:
            continue  # `exec` does not use the command of the project
        values[parameter] = _plain(path, name, value)
    return values


def parameter(command: click.Command, flag: str) -> str | None:
    """Name of the parameter that a key of the file sets; None if the command does not have it."""
    return _parameters(command).get(flag)


def read(path: Path) -> dict[str, object]:
    """The content of the file. Raises click.UsageError."""
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(f"Cannot read {path}: {error}") from error


def _error(message: str) -> click.UsageError:
    """An error with escaped text, because the file may be from a foreign repository."""
    return click.UsageError(escape(message))


def _check(name: str, keys: set[str], where: str, tables: list[str] | None = None) -> None:
    if name in _REFUSED:
        raise _error(f"{where}: {name} cannot be set here. {_REFUSED[name]}.")
    if name not in keys:
        import difflib

        near = difflib.get_close_matches(name, [*keys, *(tables or ())], 1)
        hint = f"Did you mean {near[0]}?" if near else f"Valid keys: {', '.join(sorted(keys))}."
        raise _error(f"{where}: Unknown key {name}. {hint}")


def _flags(command: click.Command) -> set[str]:
    """Long flags without their dashes, and the arguments COMMAND and DIRECTORY."""
    return set(_parameters(command))


def _parameters(command: click.Command) -> dict[str, str]:
    return {flag: param.name or "" for param in command.params for flag in _names(param)}


def _names(param: click.Parameter) -> list[str]:
    if isinstance(param, click.Argument):
        return [param.name] if param.name in ("command", "directory") else []
    return [flag.removeprefix("--") for flag in param.opts if flag.startswith("--")]


def _plain(path: Path, name: str, value: object) -> object:
    """The value for click: a table is a list of K=V; directories are relative to the file."""
    if isinstance(value, dict):
        return [f"{key}={part}" for key, part in value.items()]
    if name == "command":
        return [str(part) for part in value] if isinstance(value, list) else [str(value)]
    if name in ("directory", "overlay"):
        return str(path.parent / str(value))
    return _exact(value)


def _exact(value: object) -> object:
    """The value for click, whose integers would cut off the decimals of a float."""
    if isinstance(value, list):
        return [_exact(part) for part in value]
    return str(value) if isinstance(value, float) else value
