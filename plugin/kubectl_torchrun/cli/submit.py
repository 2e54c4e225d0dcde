"""submit, run and sync: from a directory to a run."""

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from kubectl_torchrun.cli import complete, defaults, options

if TYPE_CHECKING:
    from collections.abc import Callable

    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.terminal import Terminal
    from kubectl_torchrun.upload.job_manifest import Request

NOTHING = "; nothing was created"


class _Runs(options.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options of the user's own command are the usual surprise here."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()} If it belongs to your command, quote the command"
                ' ("python train.py --epochs 3") or put -- before it.',
                ctx,
            ) from error


class Asked(NamedTuple):
    """What `submit` and `run` have in common."""

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


_upload_timeout = click.option(
    "--upload-timeout",
    type=options.DURATION,
    default="30m",
    show_default=True,
    metavar="DURATION",
    help="How long to wait for the pod that takes the upload.",
)
_directory = click.option(
    "--directory",
    "-C",
    default=None,
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Directory to send. Default: where torchrun.toml lies, else the current one.",
)


_overlay = click.option(
    "--overlay",
    default=None,
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Directory whose files are laid over the one that is sent.",
)
# What the job's own file says, where there is one.
_WRITTEN = ("command", "nodes", "gpus", "image", "env", "after", "dev")


def _request_options(command: options.Work) -> options.Work:
    @functools.wraps(command)
    def wrapped(**given: object) -> None:
        asked = Asked(*(given.pop(name) for name in Asked._fields))  # type: ignore[arg-type]
        command(asked=asked, **given)

    result: options.Work = wrapped
    for option in (
        _upload_timeout,
        _overlay,
        _directory,
        click.option(
            "--filename",
            "-f",
            default="",
            metavar="FILE",
            help="TorchrunJob to create, in place of COMMAND and its options; - is stdin.",
        ),
        click.option(
            "--env", "-e", multiple=True, metavar="K=V", help="Environment variable; repeatable."
        ),
        click.option(
            "--after",
            multiple=True,
            metavar="JOB[=CONDITION]",
            help="Start once JOB is Succeeded, or Running or Finished as given; repeatable.",
            shell_complete=complete.jobs,
        ),
        click.option(
            "--dev", is_flag=True, help="Development: keep pods of a command that fails, for edits."
        ),
        click.option("--image", default="", help="Image to run in. Default: the queue's."),
        click.option(
            "--name", default="", help="Name of the job. Default: the directory's, and 5 letters."
        ),
        click.option(
            "--gpus", type=click.IntRange(min=1), help="GPUs in all, spread evenly over nodes."
        ),
        click.option(
            "--nodes", type=click.IntRange(min=1), help="Nodes, each with the queue's resources."
        ),
        click.option(
            "--queue",
            "-q",
            default="",
            help="TorchrunQueue. Default: the only one there is.",
            shell_complete=complete.queues,
        ),
        click.argument("command", nargs=-1),
    ):
        result = option(result)
    return result


@click.command(cls=_Runs, short_help="Send this directory, run COMMAND in it, follow")
@_request_options
@click.option("--follow/--no-follow", default=None, help="Follow the run to its end (the default).")
@options.wait_options("Complete")
@options.dry_run_option
@options.output_option("name", "yaml", "json")
@options.cluster_options
def submit(
    asked: Asked,
    follow: bool | None,
    wait: str,
    timeout: float | None,
    dry_run: str,
    output: str,
    where: options.Where,
) -> None:
    """Send the current directory and run COMMAND in it on one or more nodes.

    Left out are .git, what .gitignore and .torchrunignore name, and likely secrets. COMMAND is a
    shell line; a plain `python ...` line runs under torchrun on every node. -o, --dry-run and
    --wait imply --no-follow.

    \b
    Examples:
      kubectl torchrun submit --gpus 8 "python train.py --epochs 10"
      kubectl torchrun submit --queue dev --nodes 2 -e LR=0.1 -- python train.py --epochs 10
      kubectl torchrun submit --dry-run "python train.py" > job.yaml
      kubectl torchrun submit -f job.yaml
      kubectl torchrun submit --wait=Running --timeout 10m -o name "python train.py"
    """
    prints = output or dry_run != "none" or wait
    if follow and prints:
        raise click.UsageError("--follow prints logs; -o, --dry-run and --wait do not: choose.")
    following = not prints if follow is None else follow
    _start(asked, where, following, dry_run, output, wait, timeout)


@click.command(cls=_Runs, short_help="Send, run, follow; Ctrl-C twice deletes")
@_request_options
@click.option("--detach", "-d", is_flag=True, help="Return once the workspace is uploaded.")
@options.output_option("name", "yaml", "json")
@options.cluster_options
def run(asked: Asked, detach: bool, output: str, where: options.Where) -> None:
    """Send the current directory, run COMMAND in it and follow its logs; exit with its result.

    One Ctrl-C detaches and the run goes on; a second one within 5 seconds deletes the job. With
    --dev the job is ready for edits, which sync --watch sends from another terminal.

    \b
    Examples:
      kubectl torchrun run --gpus 8 "python train.py --epochs 10"
      kubectl torchrun run --nodes 2 --detach "python train.py"
      kubectl torchrun run --dev --name try "python train.py"
      kubectl torchrun sync try --watch
    """
    if output and not detach:
        raise click.UsageError("-o prints the job where the logs would be: add --detach.")
    _start(asked, where, not detach, "none", output, deletes=True)


def _start(
    asked: Asked,
    where: options.Where,
    follow: bool,
    dry_run: str,
    output: str,
    wait: str = "",
    timeout: float | None = None,
    *,
    deletes: bool = False,
) -> None:
    request_of = _written if asked.filename else _asked_for
    make = request_of(asked)

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import submission

        options = submission.SubmitOptions(
            _sent(asked.directory, terminal), follow, dry_run, output, asked.upload_timeout,
            wait, timeout, deletes, overlay=_path(asked.overlay),
        )  # fmt: skip
        return submission.submit(target, make(), options, terminal)

    options.run(work, where, NOTHING)


def _asked_for(asked: Asked) -> "Callable[[], Request]":
    """The request of COMMAND and its options; what is wrong with them alone is said at once."""
    nodes, gpus = _size(asked)
    command = asked.command
    line = command[0] if len(command) == 1 else shlex.join(command)
    if not line.strip():
        raise click.UsageError(
            'COMMAND is empty; give it as in "python train.py", or as command in torchrun.toml.'
        )

    def make() -> "Request":
        from kubectl_torchrun.upload.job_manifest import Request, dependencies, variables

        return Request(
            asked.name, asked.queue, line, nodes, gpus, asked.image, variables(asked.env),
            asked.dev, dependencies(asked.after),
        )  # fmt: skip

    return make


def _written(asked: Asked) -> "Callable[[], Request]":
    """The request of --filename, which goes before what torchrun.toml says of jobs."""
    source = click.get_current_context().get_parameter_source
    both = [name for name in _WRITTEN if source(name) == ParameterSource.COMMANDLINE]
    if both:
        words = ", ".join("COMMAND" if name == "command" else f"--{name}" for name in both)
        raise click.UsageError(f"{words}: with --filename the file says so; give one of the two.")

    chosen = asked.queue if source("queue") == ParameterSource.COMMANDLINE else ""

    def make() -> "Request":
        from kubectl_torchrun.upload import user_manifest
        from kubectl_torchrun.upload.job_manifest import Request

        body = user_manifest.read(asked.filename)
        name = asked.name or user_manifest.name_of(body)
        queue = chosen or user_manifest.queue_of(body) or asked.queue
        return Request(name, queue, "", written=body)

    return make


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _size(asked: Asked) -> tuple[int | None, int | None]:
    """Nodes and GPUs; one on the command line beats the other in torchrun.toml."""
    nodes, gpus = asked.nodes, asked.gpus
    if nodes and gpus:
        source = click.get_current_context().get_parameter_source
        by_default = ParameterSource.DEFAULT_MAP
        if source("nodes") == by_default != source("gpus"):
            nodes = None
        elif source("gpus") == by_default != source("nodes"):
            gpus = None
        else:
            raise click.UsageError(
                "Give --nodes or --gpus, not both: either one decides the other."
            )
    return nodes, gpus


def _sent(directory: str | None, terminal: "Terminal") -> Path:
    if directory is not None:
        return Path(directory)
    found = defaults.project()
    if found != Path.cwd():
        terminal.note(f"Sending {found}, where {defaults.FILE} lies")
    return found


@click.command(cls=options.Command, short_help="Send a directory to a job that waits or runs")
@options.job_argument
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--watch", is_flag=True, help="Go on, and send each edit (development mode).")
@_overlay
@_upload_timeout
@options.wait_options("Complete")
@options.cluster_options
def sync(
    job: str,
    directory: str | None,
    watch: bool,
    overlay: str | None,
    upload_timeout: float,
    wait: str,
    timeout: float | None,
    where: options.Where,
) -> None:
    """Send DIRECTORY (default: as submit) to JOB, which waits for its workspace or runs.

    Goes on where an upload was broken off. If the directory has changed since `submit`, the job
    takes it as it is now. Where the job runs, its pods stay: they get what changed, and start the
    command again, all together; that is no restart. With --watch each edit is sent as it is saved,
    and a broken one keeps the pods for the next (spec.development).

    A job whose workspace comes from git or s3 fetches it again; no directory is sent then.

    \b
    Examples:
      kubectl torchrun sync my-project-x7k2p
      kubectl torchrun sync my-project-x7k2p . --wait
      kubectl torchrun sync my-project-x7k2p --watch
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.cluster import wait as waiting
        from kubectl_torchrun.commands import submission

        options = submission.SubmitOptions(
            _sent(directory, terminal), False, "none", "", upload_timeout,
            wait and waiting.check(wait), timeout, watch=watch, overlay=_path(overlay),
        )  # fmt: skip
        return submission.sync(target, job, options, terminal)

    options.run(work, where, "; nothing was sent")


@click.command(cls=options.Command, short_help="The files that would be sent")
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
def files(directory: str | None) -> None:
    """Print what would be sent of DIRECTORY (default: as submit): digest, bytes, mode and path.

    An empty directory has no digest and the mode `dir`. No cluster is asked.

    \b
    Examples:
      kubectl torchrun files
      kubectl torchrun files . | sort -k 2 -n | tail
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import output
        from kubectl_torchrun.cluster.kubectl import Where
        from kubectl_torchrun.upload import cache, pack, tree

        place = _sent(directory, terminal)
        found = tree.scan(place)
        pack.check(found)
        workspace = cache.Memory(Where("", ""), place).look(found)
        output.put(workspace.manifest.text)
        return 0

    options.run(work, options.Where())


COMMANDS = (submit, run, sync, files)
