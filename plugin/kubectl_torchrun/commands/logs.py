"""`logs`: the logs of a job's nodes."""

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    raw_option,
    run_command,
)
from kubectl_torchrun.cli.types import DURATION, Count, OneOf
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("logs", cls=Command)
@job_argument
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Stream new lines until the run ends; exit with its result.",
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    type=Count(0),
    help="Only the node with this index; repeatable.",
)
@click.option(
    "--rank",
    "-r",
    "ranks",
    multiple=True,
    type=Count(0),
    help="Only the node that runs this global rank, and only the rank's lines if torchrun marks"
    " them; repeatable.",
)
@click.option(
    "--container",
    "-c",
    type=OneOf(["trainer", "sync", "serve", "setup"]),
    default="trainer",
    metavar="trainer|sync|serve|setup",
    help="Container. sync, serve and setup prepare the workspace. Default: trainer.",
)
@click.option("--attempt", type=Count(0), help="Attempt to print. Default: the latest.")
@click.option("--previous", "-p", is_flag=True, help="Print the attempt before the latest.")
@click.option("--tail", type=Count(0), metavar="N", help="Only the last N lines of each node.")
@click.option(
    "--since",
    type=DURATION,
    metavar="DURATION",
    help="Only lines newer than this, for example 10m or 5d.",
)
@raw_option
@click.option("--timestamps", is_flag=True, help="Print the time of each line.")
@click.option(
    "--prefix/--no-prefix",
    default=True,
    help="Start each line with the [index] of its node (default).",
)
@cluster_options
def command(
    job: str,
    follow: bool,
    nodes: tuple[int, ...],
    ranks: tuple[int, ...],
    container: str,
    attempt: int | None,
    previous: bool,
    tail: int | None,
    since: float | None,
    raw: bool,
    timestamps: bool,
    prefix: bool,
    target: Target,
) -> None:
    """Print the logs of JOB's nodes, merged by time. Each line starts with the [index] of its node.

    Logs of deleted pods come from copies on the job's workspace PVC. torchrun's report after a
    failed rank is folded into one line; --raw prints all of it.

    \b
    Examples:
      kubectl torchrun logs my-project-x7k2p --follow
      kubectl torchrun logs my-project-x7k2p --node 0 --tail 100
      kubectl torchrun logs my-project-x7k2p --previous --rank 3
      kubectl torchrun logs my-project-x7k2p --since 10m --timestamps --no-prefix | grep loss
      kubectl torchrun logs my-project-x7k2p --container setup
    """
    if previous and attempt is not None:
        raise click.UsageError("--previous and --attempt are mutually exclusive.")
    if follow and (previous or attempt is not None):
        raise click.UsageError("--follow shows the latest attempt. Remove --previous or --attempt.")
    if container != "trainer" and (nodes or ranks or previous or attempt is not None):
        raise click.UsageError(
            "--node, --rank, --attempt and --previous apply only to --container=trainer."
        )

    def work(terminal: Display) -> int:
        from kubectl_torchrun.logs.helper_logs import print_helper_logs
        from kubectl_torchrun.logs.logs_command import LogChoice, follow_logs, print_logs
        from kubectl_torchrun.logs.streams import LineFormat, View

        line_format = LineFormat(timestamps, prefix)
        if container != "trainer":
            view = View(tail=tail, since=since, line_format=line_format, raw=True)
            return print_helper_logs(target, job, container, view, terminal, follow=follow)
        choice = LogChoice(
            frozenset(nodes),
            frozenset(ranks),
            attempt,
            previous,
            tail,
            since,
            line_format,
            raw,
        )
        show = follow_logs if follow else print_logs
        return show(target, job, choice, terminal)

    run_command(work)
