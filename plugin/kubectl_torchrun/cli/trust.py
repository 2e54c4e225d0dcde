"""The user's consent to a torchrun.toml, which may be from a foreign repository.

Keys that choose what runs, where it runs, or what is uploaded need consent once: an answer at a
terminal, or --trust. It is recorded for the file's path and the values of these keys.

In a file of another local user, all keys need consent, and so does the upload of its directory:
anybody can create a file in a directory above that all users may write to.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from kubectl_torchrun.cli import defaults
from kubectl_torchrun.home import home

if TYPE_CHECKING:
    from kubectl_torchrun.terminal import Terminal

FLAG = "--trust"
# Other keys only affect amounts, times and output, in the cluster that the user has selected.
# A variable such as PYTHONPATH or LD_PRELOAD chooses what runs, and no list of them is complete.
_KEYS = frozenset({"address", "command", "context", "env", "filename", "image", "namespace", "yes"})
_DIRECTORIES = frozenset({"directory", "overlay"})
# Keys that the file of --filename replaces.
_OF_JOBS = frozenset({"command", "env", "image"})
_TRUST_KEY = "torchrun.trust"  # in the meta of a context


def option() -> click.Option:
    """--trust, for every command."""

    def keep(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.meta[_TRUST_KEY] = value

    return click.Option(
        [FLAG],
        is_flag=True,
        expose_value=False,
        callback=keep,
        help=f"Trust the current settings of {defaults.FILE}.",
    )


def check(ctx: click.Context, terminal: "Terminal") -> None:
    """Ask for consent if this command uses one of these keys of the file.

    Raises UsageProblem without it.
    """
    path = defaults.find()
    if path is None or path.parent == home().resolve():  # the user's file for all projects
        return
    content = defaults.read(path)
    settings = _relevant_settings(path, content)
    owner = _foreign_owner(path)
    if owner is not None:
        settings = {"directory": str(path.parent), **content, **settings}
    record = _record_path(path)
    if ctx.meta.get(_TRUST_KEY):
        _write_record(record, path, settings)
        return
    used = {key: value for key, value in settings.items() if owner or _is_used(ctx, key)}
    if not used or _is_trusted(record, path, settings):
        return
    keys = "".join(f"\n  {key} = {json.dumps(value, default=str)}" for key, value in used.items())
    origin = f"belongs to user {owner}" if owner else "may come from a repository"
    instead = f"a {defaults.FILE} of your own here" if owner else "these flags on the command line"
    why = (
        f"{path} sets{keys}\nThese settings control what runs, where it runs or what is uploaded,"
        f" and the file {origin}. They need your confirmation."
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        _refuse_file(f"{why} Review the file and add {FLAG} once, or use {instead}.")
    from kubectl_torchrun.terminal import ask

    terminal.note(why)
    if ask("Trust these settings until they change? [y/N]:").lower() not in ("y", "yes"):
        _refuse_file(f"Settings are not trusted. Use {instead}.")
    _write_record(record, path, settings)


def _refuse_file(why: str) -> None:
    from kubectl_torchrun.errors import UsageProblem

    raise UsageProblem(why)


def _foreign_owner(path: Path) -> str | None:
    """Another user than root who can replace the file; None if there is none."""
    owners = {path.lstat().st_uid, path.stat().st_uid, path.parent.stat().st_uid}
    others = owners - {os.getuid(), 0}
    if not others:
        return None
    import pwd

    try:
        return pwd.getpwuid(min(others)).pw_name
    except KeyError:
        return str(min(others))


def _relevant_settings(path: Path, content: dict[str, object]) -> dict[str, object]:
    """The values of these keys; those of a command's table as `command.key`."""
    settings: dict[str, object] = {}
    for key, value in content.items():
        if isinstance(value, dict) and key not in _KEYS:
            inner = {f"{key}.{name}": each for name, each in value.items()}
        else:
            inner = {key: value}
        for full, each in inner.items():
            name = full.rpartition(".")[2]
            if name in _KEYS:
                settings[full] = each
            elif name in _DIRECTORIES and _leads_out(path.parent, str(each)):
                # The target of a link may change later.
                settings[full] = [str(each), str((path.parent / str(each)).resolve())]
    return settings


def _leads_out(top: Path, directory: str) -> bool:
    if Path(directory).is_absolute():
        return True
    return not (top / directory).resolve().is_relative_to(top.resolve())


def _is_used(ctx: click.Context, key: str) -> bool:
    """Whether the command's value of the key comes from the file."""
    table, _, name = key.rpartition(".")
    if table not in ("", ctx.command.name):
        return False
    param = defaults.parameter(ctx.command, name)
    if param is None or ctx.get_parameter_source(param) != ParameterSource.DEFAULT_MAP:
        return False
    if name in _OF_JOBS and ctx.params.get("filename"):
        return False
    return not ctx.find_root().params.get(param)  # given before the command's name


def _digest(path: Path, settings: dict[str, object]) -> str:
    text = json.dumps([str(path), settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _record_path(path: Path) -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or home() / ".config"
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
    return Path(config) / "kubectl-torchrun" / "trusted" / name


def _is_trusted(record: Path, path: Path, settings: dict[str, object]) -> bool:
    try:
        return record.read_text(encoding="utf-8").split("\n")[0] == _digest(path, settings)
    except (OSError, UnicodeDecodeError):
        return False


def _write_record(record: Path, path: Path, settings: dict[str, object]) -> None:
    """Record the consent. If home is not writable, the next command asks again."""
    temporary = record.with_name(f"{record.name}.{os.getpid()}")
    with suppress(OSError, UnicodeEncodeError):
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{_digest(path, settings)}\n{path}\n", encoding="utf-8")
        temporary.replace(record)
