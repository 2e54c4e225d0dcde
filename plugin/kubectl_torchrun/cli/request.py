"""Flags of `submit` and `run`, and the job request from them."""

import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from kubectl_torchrun.cli import complete, defaults, options
from kubectl_torchrun.cli.types import DURATION, Count
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from kubectl_torchrun.upload.job_manifest import Request

INTERRUPTED = "; nothing was created"
# Flags whose values come from the file of --filename instead.
_IN_FILE = ("command", "nodes", "gpus", "image", "env", "after", "dev")


class RequestCommand(options.Command):
    """A command whose last argument is a command of the user."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Explain an unknown option, which is usually an option of the user's command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()} If it belongs to your command, quote the command"
                ' ("python train.py --epochs 3") or add -- before it.',
                ctx,
            ) from error


class RequestFlags(NamedTuple):
    """The values of the flags. upload_timeout: seconds."""

    command: tuple[str, ...]
    queue: str
    nodes: int | None
    gpus: int | None
    name: str
    image: str
    env: tuple[str, ...]
    after: tuple[str, ...]
    dev: bool
    filename: str
    directory: str | None
    overlay: str | None
    upload_timeout: float


upload_timeout_option = click.option(
    "--upload-timeout",
    type=DURATION,
    default="30m",
    show_default=True,
    metavar="DURATION",
    help="Time limit for the pod that receives the upload to start.",
)
overlay_option = click.option(
    "--overlay",
    default=None,
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Directory whose files replace or extend the uploaded ones.",
)
_directory_option = click.option(
    "--directory",
    "-C",
    default=None,
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Directory to upload. Default: that of torchrun.toml, else the current one.",
)


def request_options(command: options.Function) -> options.Function:
    """The flags, passed to the command as one `flags: RequestFlags`."""

    @functools.wraps(command)
    def wrapped(**values: object) -> None:
        flags = RequestFlags(*(values.pop(name) for name in RequestFlags._fields))  # type: ignore[arg-type]
        command(flags=flags, **values)

    result: options.Function = wrapped
    for option in (
        upload_timeout_option,
        overlay_option,
        _directory_option,
        click.option(
            "--filename",
            "-f",
            default="",
            metavar="FILE",
            help="Create the TorchrunJob in this file, without COMMAND; - reads stdin.",
        ),
        click.option(
            "--env", "-e", multiple=True, metavar="K=V", help="Environment variable; repeatable."
        ),
        click.option(
            "--after",
            multiple=True,
            metavar="JOB[=CONDITION]",
            help="Start when JOB is Succeeded (default), Running or Finished; repeatable.",
            shell_complete=complete.jobs,
        ),
        click.option(
            "--dev", is_flag=True, help="Development mode: keep pods of a failed command for edits."
        ),
        click.option("--image", default="", help="Container image. Default: that of the queue."),
        click.option(
            "--name",
            default="",
            help="Name of the job. Default: directory name and 5 random characters.",
        ),
        click.option(
            "--gpus",
            type=Count(1),
            help="Total number of GPUs, spread evenly over nodes.",
        ),
        click.option(
            "--nodes",
            type=Count(1),
            help="Number of nodes with the resources of the queue.",
        ),
        click.option(
            "--queue",
            "-q",
            default="",
            help="TorchrunQueue. Default: the only queue in the namespace.",
            shell_complete=complete.queues,
        ),
        click.argument("command", nargs=-1),
    ):
        result = option(result)
    return result


def request_of(flags: RequestFlags) -> "Callable[[], Request]":
    """A function that returns the request. It raises UsageProblem.

    Raises click.UsageError at once for contradictory flags.
    """
    return _request_of_file(flags) if flags.filename else _request_of_command(flags)


def _request_of_command(flags: RequestFlags) -> "Callable[[], Request]":
    nodes, gpus = _size(flags)
    command = flags.command
    line = command[0] if len(command) == 1 else shlex.join(command)
    if not line.strip():
        raise click.UsageError('COMMAND is empty. Add it, for example "python train.py".')

    def make() -> "Request":
        from kubectl_torchrun.upload.job_manifest import Request, dependencies, variables

        return Request(
            flags.name, flags.queue, line, nodes, gpus, flags.image, variables(flags.env),
            flags.dev, dependencies(flags.after),
        )  # fmt: skip

    return make


def _request_of_file(flags: RequestFlags) -> "Callable[[], Request]":
    """The request of --filename. Values of the file override those of torchrun.toml."""
    source = click.get_current_context().get_parameter_source
    both = [name for name in _IN_FILE if source(name) == ParameterSource.COMMANDLINE]
    if both:
        words = ", ".join("COMMAND" if name == "command" else f"--{name}" for name in both)
        raise click.UsageError(f"{words} cannot be combined with --filename. Set it in the file.")

    name_flag, queue_flag = (
        value if source(flag) == ParameterSource.COMMANDLINE else ""
        for flag, value in (("name", flags.name), ("queue", flags.queue))
    )

    def make() -> "Request":
        from kubectl_torchrun.upload import user_manifest
        from kubectl_torchrun.upload.job_manifest import Request

        body = user_manifest.read(flags.filename)
        name = name_flag or user_manifest.name_of(body) or flags.name
        queue = queue_flag or user_manifest.queue_of(body) or flags.queue
        return Request(name, queue, "", manifest=body)

    return make


def _size(flags: RequestFlags) -> tuple[int | None, int | None]:
    """Nodes and GPUs. One on the command line overrides the other in torchrun.toml."""
    nodes, gpus = flags.nodes, flags.gpus
    if nodes and gpus:
        source = click.get_current_context().get_parameter_source
        by_default = ParameterSource.DEFAULT_MAP
        if source("nodes") == by_default != source("gpus"):
            nodes = None
        elif source("gpus") == by_default != source("nodes"):
            gpus = None
        else:
            raise click.UsageError(
                "--nodes and --gpus are mutually exclusive. Each determines the other."
            )
    return nodes, gpus


def optional_path(text: str | None) -> Path | None:
    """The path of an optional flag."""
    return None if text is None else Path(text)


def sync_arguments(directory: str | None, overlay: str | None) -> tuple[str, ...]:
    """The arguments with which `sync` uploads the same files.

    Without a directory there is none: `sync` finds that of the project, as this command does.
    """
    where = () if directory is None else (str(Path(directory).resolve()),)
    return where if overlay is None else (*where, f"--overlay={Path(overlay).resolve()}")


def directory_to_send(directory: str | None, terminal: Display) -> Path:
    """The directory of the flag, else of the project, with a note if it is not the current one."""
    if directory is not None:
        return Path(directory)
    project = defaults.project()
    if project != Path.cwd():
        terminal.note(f"Uploading {project}, the directory of {defaults.FILE}.")
    return project
