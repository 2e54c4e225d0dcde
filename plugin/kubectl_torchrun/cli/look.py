"""list, status, logs and why: what there is and what it does."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import complete, options

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.terminal import Terminal


@click.command(
    "list", cls=options.Command, short_help="List jobs: phase, progress, what they wait for"
)
@click.option("--all-namespaces", "-A", is_flag=True, help="Jobs of all namespaces.")
@click.option("--selector", "-l", default="", metavar="K=V", help="Only jobs with these labels.")
@click.option(
    "--queue", "-q", default="", help="Only jobs of this queue.", shell_complete=complete.queues
)
@click.option(
    "--phase", "phases", multiple=True, metavar="PHASE", help="Only jobs in it; repeatable."
)
@options.output_option("name", "yaml", "json")
@options.cluster_options
def list_(
    all_namespaces: bool,
    selector: str,
    queue: str,
    phases: tuple[str, ...],
    output: str,
    where: options.Where,
) -> None:
    """List the jobs: queue, nodes, phase, progress, age and what they wait for. Newest last.

    \b
    Examples:
      kubectl torchrun list
      kubectl torchrun list -A --phase Running --phase Queued
      kubectl torchrun list --queue gpu -o name
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import listing

        choice = listing.Choice(all_namespaces, selector, queue, frozenset(phases))
        return listing.jobs(target, choice, output, terminal)

    options.run(work, where)


@click.command(cls=options.Command, short_help="One job on a screen, live")
@options.job_argument
@click.option(
    "--watch/--no-watch",
    "-w",
    default=None,
    help="Redraw until the run ends. Default: on a terminal.",
)
@options.output_option("name", "yaml", "json")
@options.cluster_options
def status(job: str, watch: bool | None, output: str, where: options.Where) -> None:
    """Show JOB's phase, reason, progress, attempts and pods; live on a terminal.

    A live view ends with the run and has its exit code; elsewhere one view is printed, or with
    --watch a line for each change.

    \b
    Examples:
      kubectl torchrun status my-project-x7k2p
      kubectl torchrun status my-project-x7k2p --no-watch
      kubectl torchrun status my-project-x7k2p -o yaml
    """
    if watch and output:
        raise click.UsageError("-o prints one object; --watch many views: choose.")

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import status

        return status.show(target, job, terminal, watch=watch, form=output)

    options.run(work, where, "; the job goes on")


@click.command(cls=options.Command, short_help="Logs of all ranks by time, of any attempt")
@options.job_argument
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
@click.option("--since", type=options.DURATION, metavar="DURATION", help="Not older than this.")
@options.cluster_options
def logs(
    job: str,
    follow: bool,
    nodes: tuple[int, ...],
    ranks: tuple[int, ...],
    attempt: int | None,
    previous: bool,
    tail: int | None,
    since: float | None,
    where: options.Where,
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

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import logs

        wanted = logs.Wanted(frozenset(nodes), frozenset(ranks), attempt, previous, tail, since)
        return logs.logs(target, job, wanted, terminal, follow_it=follow)

    options.run(work, where)


@click.command(cls=options.Command, short_help="Why a job waits or died")
@options.job_argument
@options.cluster_options
def why(job: str, where: options.Where) -> None:
    """Say why JOB waits or died: reason, earlier attempts, last lines of the first failed rank.

    \b
    Example:
      kubectl torchrun why my-project-x7k2p
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import why

        return why.why(target, job)

    options.run(work, where)


@click.command(cls=options.Command, short_help="What a job's processes have kept on its claim")
@options.job_argument
@click.argument("path", default=".")
@options.cluster_options
def kept(job: str, path: str, where: options.Where) -> None:
    """Print the files at PATH of JOB's state directory, each behind a line with its name.

    The job's processes have it as $TORCHRUN_STATE_DIR. It is on the workspace claim, outlives
    the pods and goes with the job; logs of former attempts are in it, too.

    \b
    Examples:
      kubectl torchrun kept my-project-x7k2p
      kubectl torchrun kept my-project-x7k2p logs/0/node-0.log
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import kept

        return kept.show(target, job, path, terminal)

    options.run(work, where)


COMMANDS = (list_, status, logs, why, kept)
