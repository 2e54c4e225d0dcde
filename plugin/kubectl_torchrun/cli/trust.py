"""The user's consent to a torchrun.toml, which may be from a foreign repository.

Keys that choose what runs, where it runs, or what is uploaded need consent once: an answer at a
terminal, or --trust. It is recorded for the file's path and the values of these keys.
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

if TYPE_CHECKING:
    from kubectl_torchrun.terminal import Terminal

FLAG = "--trust"
# Other keys only affect amounts, times and output, in the cluster that the user has selected.
_KEYS = frozenset({"address", "command", "context", "filename", "image", "namespace", "yes"})
_DIRECTORIES = frozenset({"directory", "overlay"})
# Keys that the file of --filename replaces.
_OF_JOBS = frozenset({"command", "image"})
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
    if path is None or path.parent == Path.home().resolve():  # the user's file for all projects
        return
    settings = _relevant_settings(path, defaults.read(path))
    record = _record_path(path)
    if ctx.meta.get(_TRUST_KEY):
        _write_record(record, path, settings)
        return
    used = {key: value for key, value in settings.items() if _is_used(ctx, key)}
    if not used or _is_trusted(record, path, settings):
        return
    keys = "".join(f"\n  {key} = {json.dumps(value)}" for key, value in used.items())
    why = (
        f"{path} sets{keys}\nThese settings control what runs, where it runs or what is uploaded,"
        " and the file may come from a repository. They need your confirmation."
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        _refuse_file(
            f"{why} Review the file and add {FLAG} once, or set these flags on the command line."
        )
    from kubectl_torchrun.terminal import ask

    terminal.note(why)
    if ask("Trust these settings until they change? [y/N]:").lower() not in ("y", "yes"):
        _refuse_file("Settings are not trusted. Set these flags on the command line instead.")
    _write_record(record, path, settings)


def _refuse_file(why: str) -> None:
    from kubectl_torchrun.errors import UsageProblem

    raise UsageProblem(why)


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
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
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
