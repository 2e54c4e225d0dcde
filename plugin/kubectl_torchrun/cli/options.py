"""Common parts of all commands: flags, defaults from torchrun.toml, exit codes.

The top level imports only modules that `kubectl torchrun --help` needs.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from kubectl_torchrun.cli import complete, defaults
from kubectl_torchrun.cli.types import DURATION, JOB, OneOf

if TYPE_CHECKING:
    from kubectl_torchrun.terminal import Display

Function = Callable[..., None]
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_HELP = frozenset({"-h", "--help"})


class OptionalValue(click.Option):
    """An option with its value after `=` or without a value, as in kubectl: --wait, --wait=Running.

    bare: the value of the option without a value.
    """

    def __init__(self, names: Sequence[str], *, bare: str, **rest: object) -> None:
        super().__init__(names, **rest)  # type: ignore[arg-type]
        self.bare = bare

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The help without click's space before the value: the value is not a separate word."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


def _color_option() -> click.Option:
    """--color, for every command. `terminal.has_colour` reads the value."""

    def store(ctx: click.Context, _: click.Parameter, value: str) -> None:
        from kubectl_torchrun.terminal import COLOR_KEY

        ctx.meta[COLOR_KEY] = value

    return click.Option(
        ["--color"],
        type=OneOf(["auto", "always", "never"]),
        default="auto",
        metavar="auto|always|never",
        expose_value=False,
        callback=store,
        help="When to print colors. Default: auto, on terminals without NO_COLOR.",
    )


class Command(click.Command):
    """A command with defaults from torchrun.toml."""

    def __init__(self, *positional: object, **rest: object) -> None:
        rest.setdefault("context_settings", CONTEXT_SETTINGS)
        super().__init__(*positional, **rest)  # type: ignore[arg-type]
        self.params.append(_color_option())

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """Read the defaults, except for --help, which also works with a broken torchrun.toml."""
        own = args[: args.index("--")] if "--" in args else args
        if parent is not None and not _HELP.intersection(own) and not parent.resilient_parsing:
            group = parent.command
            assert isinstance(group, click.Group)
            extra["default_map"] = defaults.of_command(group, self)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace each OptionalValue without a value by the option with its bare value."""
        bare = {
            name: f"{name}={param.bare}"
            for param in self.params
            if isinstance(param, OptionalValue)
            for name in param.opts
        }
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(
            ctx, [bare.get(arg, arg) if at < end else arg for at, arg in enumerate(args)]
        )


def cluster_options(command: Function) -> Function:
    """--kubeconfig, --context and --namespace, passed to the command as one `target: Target`.

    Each is also accepted before the name of the command.
    """

    @functools.wraps(command)
    def wrapped(*, kubeconfig: str, context: str, namespace: str, **rest: object) -> None:
        from kubectl_torchrun.cluster.kubectl import Target

        target = Target(
            _own_or_outer("kubeconfig", kubeconfig),
            _own_or_outer("context", context),
            _own_or_outer("namespace", namespace),
        )
        command(target=target, **rest)

    return plain_cluster_options(wrapped)


def _own_or_outer(name: str, own: str) -> str:
    """The flag after the command's name, else the one before it."""
    return own or str(click.get_current_context().find_root().params.get(name) or "")


def plain_cluster_options(command: Function) -> Function:
    """--kubeconfig, --context and --namespace as three parameters."""
    for option in (
        click.option("--kubeconfig", default="", metavar="FILE", help="Path to the kubeconfig."),
        click.option(
            "--context",
            default="",
            metavar="NAME",
            help="Context of the kubeconfig.",
            shell_complete=complete.contexts,
        ),
        click.option(
            "--namespace",
            "-n",
            default="",
            metavar="NS",
            help="Namespace of jobs and queues.",
            shell_complete=complete.namespaces,
        ),
    ):
        command = option(command)
    return command


def output_option(*formats: str) -> Callable[[Function], Function]:
    """-o with these formats; `name` prints `KIND.torchrun.ai/NAME`, `wide` a larger table."""
    return click.option(
        "--output",
        "-o",
        default="",
        type=OneOf(formats),
        metavar="|".join(formats),
        help="Output format.",
    )


def job_argument(command: Function) -> Function:
    """The argument JOB."""
    return click.argument("job", type=JOB, metavar="JOB", shell_complete=complete.jobs)(command)


local_option = click.option(
    "--local", "is_local", is_flag=True, help="A run on this machine (run --local)."
)

raw_option = click.option(
    "--raw", is_flag=True, help="Print torchrun's reports of failed ranks in full."
)

repeated_failure_option = click.option(
    "--stop-on-repeated-failure/--keep-retrying",
    default=None,
    help="Suspend the job if 3 attempts in a row fail within a minute with the same exception,"
    " before the first step. Default: if you follow the job on a terminal.",
)

watch_option = click.option(
    "--watch", "-w", is_flag=True, help="Follow changes until Ctrl-C: live on a terminal."
)


def check_watch(watch: bool, output: str) -> None:
    """Raises click.UsageError for --watch with a format for programs."""
    if watch and output not in ("", "wide"):
        raise click.UsageError(f"--watch shows a table. Remove it, or --output={output}.")


dry_run_option = click.option(
    "--dry-run",
    cls=OptionalValue,
    bare="server",
    default="none",
    type=OneOf(["none", "client", "server"]),
    metavar="[=client|server]",
    help="Validate without changes: by the API server (server, default) or locally (client).",
)


def wait_options(bare: str) -> Callable[[Function], Function]:
    """--wait[=CONDITION] and --timeout. bare: the condition of --wait without a value.

    Raises click.UsageError for --timeout without --wait; one of torchrun.toml has no effect then.
    """

    def add(inner: Function) -> Function:
        @functools.wraps(inner)
        def wrapped(**values: object) -> None:
            source = click.get_current_context().get_parameter_source("timeout")
            if source == ParameterSource.COMMANDLINE and not values["wait"]:
                raise click.UsageError("--timeout limits --wait. Add --wait.")
            inner(**values)

        command = click.option(
            "--timeout",
            type=DURATION,
            default=None,
            metavar="DURATION",
            help="Time limit of --wait, for example 90s or 1h30m. Default: no timeout.",
        )(wrapped)
        return click.option(
            "--wait",
            cls=OptionalValue,
            bare=bare,
            default="",
            metavar="[=CONDITION]",
            help=f"Wait for a phase (Running) or a condition (Complete). Without a value: {bare}.",
        )(command)

    return add


def run_command(work: "Callable[[Display], int]", interrupted: str = "") -> None:
    """Run a command and exit with its code.

    For a Problem, print its message and exit with its code. interrupted: text after `Stopped` at
    Ctrl-C.
    """
    from kubectl_torchrun.errors import DETACHED, Problem
    from kubectl_torchrun.terminal import Display
    from kubectl_torchrun.text import echo

    with Display() as terminal:
        try:
            code = work(terminal)
            sys.stdout.flush()
        except Problem as problem:
            terminal.at_rest()
            echo(f"Error: {problem}", file=sys.stderr)
            code = problem.exit_code
        except BrokenPipeError:
            code = _discard_output()
        except KeyboardInterrupt:
            terminal.interrupted()
            with contextlib.suppress(BrokenPipeError):
                echo(f"Stopped{interrupted}.", file=sys.stderr)
            code = DETACHED
    sys.exit(code)


def _discard_output() -> int:
    """Redirect closed output to /dev/null, so that Python can close its streams without errors."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(nowhere, stream.fileno())
    from torchrun_api.contract.exit_codes import CLOSED_PIPE

    return CLOSED_PIPE
