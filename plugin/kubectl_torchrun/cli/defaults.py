"""torchrun.toml: defaults of flags, in the working directory or the nearest directory above.

queue = "gpu"              # the flag --queue, of each command that has it
nodes = 2
[logs]                     # flags of one command
tail = 100

The file may come from a foreign repository, so it sets amounts, names and output only.
"""

import os
from collections.abc import Callable
from pathlib import Path

import click

from kubectl_torchrun.errors import why
from kubectl_torchrun.home import home
from kubectl_torchrun.text import escape

FILE = "torchrun.toml"
_IGNORED_KEY = "torchrun.no-defaults"  # in the meta of a context
# Keys that choose what runs (an environment variable such as PYTHONPATH does, and a kubeconfig
# starts programs), where it runs, what is uploaded, written or deleted, and who can connect.
_REFUSED = frozenset(
    {
        *("command", "image", "runtime-image", "env", "filename", "directory", "overlay"),
        *("local", "status-file", "kubeconfig", "context", "namespace", "address", "yes"),
        "output-dir",
    }
)


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
    found = next((file for at in (here, *here.parents) if (file := at / FILE).is_file()), None)
    if found is not None:
        _check_owner(found)
    return found


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


def _check_owner(path: Path) -> None:
    """Refuse the file of another user in a directory above, which all users may write to."""
    if path.lstat().st_uid not in (os.getuid(), 0, _working_directory().stat().st_uid):
        raise _error(
            f"{path} belongs to another user. Use a {FILE} of your own here, or kubectl torchrun"
            " --no-defaults."
        )


def of_command(group: click.Group, command: click.Command) -> dict[str, object]:
    """The values of the file for this command. Raises click.UsageError with invalid keys."""
    path = find()
    if path is None:
        return {}
    content = _read(path)
    flags = {name: set(_parameters(member)) for name, member in group.commands.items()}
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
        values[parameter] = _exact(value)
    return values


def _read(path: Path) -> dict[str, object]:
    """The content of the file. Raises click.UsageError."""
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(f"Cannot read {path}: {why(error)}") from error


def _error(message: str) -> click.UsageError:
    """An error with escaped text, because the file may be from a foreign repository."""
    return click.UsageError(escape(message))


def _check(name: str, keys: set[str], where: str, tables: list[str] | None = None) -> None:
    if name in _REFUSED:
        raise _error(
            f"{where}: {name} cannot be set here, because the file may come from a repository."
            " Write it on the command line."
        )
    if name not in keys:
        import difflib

        near = difflib.get_close_matches(name, [*keys, *(tables or ())], 1)
        hint = f"Did you mean {near[0]}?" if near else f"Valid keys: {', '.join(sorted(keys))}."
        raise _error(f"{where}: Unknown key {name}. {hint}")


def _parameters(command: click.Command) -> dict[str, str]:
    """The parameters by their long flags without dashes."""
    return {
        flag.removeprefix("--"): param.name or ""
        for param in command.params
        for flag in param.opts
        if flag.startswith("--")
    }


def _exact(value: object) -> object:
    """The value for click, whose integers would cut off the decimals of a float."""
    if isinstance(value, list):
        return [_exact(part) for part in value]
    return str(value) if isinstance(value, float | dict) else value
