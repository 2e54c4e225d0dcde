"""`run`: upload a directory, run a command in it and follow it, as on this machine."""

import sys
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from kubectl_torchrun.cli.options import (
    cluster_options,
    output_option,
    raw_option,
    repeated_failure_option,
    run_command,
)
from kubectl_torchrun.cli.request import (
    INTERRUPTED,
    RequestCommand,
    RequestFlags,
    directory_to_send,
    optional_path,
    request_of,
    request_options,
    sync_arguments,
)
from kubectl_torchrun.cli.types import Count
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kubectl_torchrun.upload.job_manifest import Request

# Flags of a cluster: --local names those that are given, and goes on without them.
_OF_CLUSTERS = ("queue", "image", "after", "overlay", "upload_timeout")


@click.command("run", cls=RequestCommand)
@request_options
@click.option("--detach", "-d", is_flag=True, help="Return after the upload.")
@click.option("--local", is_flag=True, help="Run on this machine, without a cluster.")
@click.option(
    "--gpus-per-node",
    type=Count(0),
    default=None,
    help="With --local: GPUs of each node, and so its ranks. Default: one rank.",
)
@click.option("--reload", is_flag=True, help="With --local: restart the command after each edit.")
@click.option("--status-file", type=click.Path(dir_okay=False), hidden=True)  # for the SDK
@raw_option
@repeated_failure_option
@output_option("name", "yaml", "json")
@cluster_options
def command(
    flags: RequestFlags,
    detach: bool,
    local: bool,
    gpus_per_node: int | None,
    reload: bool,
    status_file: str | None,
    raw: bool,
    stop_on_repeated_failure: bool | None,
    output: str,
    target: Target,
) -> None:
    """Upload the current directory, run COMMAND in it and follow its logs; exit with its result.

    Ctrl-C detaches and the run continues. A second Ctrl-C within 5 seconds deletes the job. With
    --dev, sync --watch in another terminal uploads each edit. -o needs --detach.

    With --local, the nodes are processes of this machine: no cluster, no image, no upload. Ctrl-C
    stops the run.

    \b
    Examples:
      kubectl torchrun run --local --nodes 2 "python train.py"
      kubectl torchrun run --gpus 8 "python train.py --epochs 10"
      kubectl torchrun run --nodes 2 --detach "python train.py"
      kubectl torchrun run --dev --name try "python train.py"
      kubectl torchrun sync try --watch
    """
    if output and not detach:
        raise click.UsageError("-o prints the job instead of its logs. Add --detach.")
    make_request = request_of(flags)
    if local:
        if detach:
            raise click.UsageError("--detach needs a cluster. Remove it, or --local.")
        _run_locally(
            *(flags, make_request, gpus_per_node, reload, raw, stop_on_repeated_failure),
            status_file=optional_path(status_file),
        )
        return
    if reload or gpus_per_node is not None:
        option = "--reload" if reload else "--gpus-per-node"
        instead = "--dev, and sync --watch" if reload else "--gpus, the total of all nodes"
        raise click.UsageError(f"{option} needs --local. On a cluster, use {instead}.")

    def work(terminal: Display) -> int:
        from kubectl_torchrun.upload.submission import SubmitOptions, submit

        options = SubmitOptions(
            directory_to_send(flags.directory, terminal),
            overlay=optional_path(flags.overlay),
            sync_arguments=sync_arguments(flags.directory, flags.overlay),
            follow=not detach,
            raw=raw,
            stop_on_repeated_failure=stop_on_repeated_failure,
            form=output,
            pod_wait=flags.upload_timeout,
            deletes=True,
        )
        return submit(target, make_request(), options, terminal)

    run_command(work, INTERRUPTED)


def _run_locally(
    flags: RequestFlags,
    make_request: "Callable[[], Request]",
    gpus_per_node: int | None,
    reload: bool,
    raw: bool,
    stop_on_repeated_failure: bool | None,
    status_file: "Path | None",
) -> None:
    """Run on this machine, and exit with the result."""
    source = click.get_current_context().get_parameter_source
    unused = [name for name in _OF_CLUSTERS if source(name) == ParameterSource.COMMANDLINE]

    def work(terminal: Display) -> int:
        from kubectl_torchrun.local.run import LocalOptions, run

        if unused:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            terminal.note(f"Not used with --local: {named}.")
        stops = sys.stderr.isatty() if stop_on_repeated_failure is None else None
        options = LocalOptions(
            directory_to_send(flags.directory, terminal),
            gpus_per_node=gpus_per_node,
            reload=reload or flags.dev,
            raw=raw,
            stop_on_repeated_failure=bool(stops or stop_on_repeated_failure),
            status_file=status_file,
        )
        return run(make_request(), options, terminal)

    run_command(work, INTERRUPTED)
