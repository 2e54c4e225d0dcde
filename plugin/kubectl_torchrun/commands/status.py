"""`status`: a job and its pods."""

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    output_option,
    run_command,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("status", cls=Command)
@job_argument
@click.option(
    "--watch/--no-watch",
    "-w",
    default=None,
    help="Redraw until the run ends. Default: on a terminal.",
)
@output_option("name", "wide", "yaml", "json")
@cluster_options
def command(job: str, watch: bool | None, output: str, target: Target) -> None:
    """Show the phase, reason, progress, attempts and pods of JOB; live on a terminal.

    A live view ends with the run and returns its exit code. Without a terminal, print the status
    once, or with --watch one line for each change. -o wide prints it once, with the IPs of pods.

    \b
    Examples:
      kubectl torchrun status my-project-x7k2p
      kubectl torchrun status my-project-x7k2p --no-watch
      kubectl torchrun status my-project-x7k2p -o yaml
    """
    if watch and output:
        raise click.UsageError("--output and --watch are mutually exclusive.")

    def work(terminal: Display) -> int:
        from kubectl_torchrun.logs.status_view import show

        return show(target, job, terminal, watch=watch, form=output)

    run_command(work, "; the job continues")
