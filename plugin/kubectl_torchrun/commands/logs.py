"""`logs`: the logs of a job's workers."""

import click

from kubectl_torchrun.cli.options import (
    DURATION,
    Command,
    cluster_options,
    job_argument,
    run_command,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Terminal


@click.command("logs", cls=Command)
@job_argument
@click.option(
    "--follow", "-f", is_flag=True, help="Go on until the run ends; exit with its result."
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    type=click.IntRange(min=0),
    help="Only this node's (worker's) log, by its number; repeatable.",
)
@click.option(
    "--rank",
    "-r",
    "ranks",
    multiple=True,
    type=click.IntRange(min=0),
    help="Only this global rank's: of its node, and its own lines where they are marked.",
)
@click.option("--attempt", type=click.IntRange(min=0), help="This attempt. Default: the newest.")
@click.option("--previous", "-p", is_flag=True, help="The attempt before the newest.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Last N lines of each node.")
@click.option("--since", type=DURATION, metavar="DURATION", help="Not older than this.")
@cluster_options
def command(
    job: str,
    follow: bool,
    nodes: tuple[int, ...],
    ranks: tuple[int, ...],
    attempt: int | None,
    previous: bool,
    tail: int | None,
    since: float | None,
    target: Target,
) -> None:
    """Print the logs of JOB's workers in one stream by time, each line with its node's [number].

    Logs of attempts whose pods are gone come from the copies on the job's workspace claim.

    \b
    Examples:
      kubectl torchrun logs my-project-x7k2p --follow
      kubectl torchrun logs my-project-x7k2p --node 0 --tail 100
      kubectl torchrun logs my-project-x7k2p --previous --rank 3
      kubectl torchrun logs my-project-x7k2p --since 10m | grep loss
    """
    if previous and attempt is not None:
        raise click.UsageError("Give --previous or --attempt, not both.")
    if follow and (previous or attempt is not None):
        raise click.UsageError("--follow shows the newest attempt; leave out --attempt.")

    def work(terminal: Terminal) -> int:
        from kubectl_torchrun.logs.logs_command import LogChoice, follow_logs, print_logs

        chosen = LogChoice(frozenset(nodes), frozenset(ranks), attempt, previous, tail, since)
        show = follow_logs if follow else print_logs
        return show(target, job, chosen, terminal)

    run_command(work)
