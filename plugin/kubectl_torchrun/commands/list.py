"""`list`: a table of jobs."""

import click

from kubectl_torchrun.cli import complete
from kubectl_torchrun.cli.options import Command, cluster_options, output_option, run_command
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Terminal


@click.command("list", cls=Command)
@click.option("--all-namespaces", "-A", is_flag=True, help="List jobs of all namespaces.")
@click.option("--selector", "-l", default="", metavar="K=V", help="Only jobs with these labels.")
@click.option(
    "--queue", "-q", default="", help="Only jobs of this queue.", shell_complete=complete.queues
)
@click.option(
    "--phase", "phases", multiple=True, metavar="PHASE", help="Only jobs in this phase; repeatable."
)
@output_option("name", "yaml", "json")
@cluster_options
def command(
    all_namespaces: bool,
    selector: str,
    queue: str,
    phases: tuple[str, ...],
    output: str,
    target: Target,
) -> None:
    """List jobs with queue, nodes, phase, progress, age and reason. The newest job is last.

    \b
    Examples:
      kubectl torchrun list
      kubectl torchrun list -A --phase Running --phase Queued
      kubectl torchrun list --queue gpu -o name
    """

    def work(terminal: Terminal) -> int:
        from kubectl_torchrun.cluster.job_list import JobFilter, print_jobs

        job_filter = JobFilter(all_namespaces, selector, queue, frozenset(phases))
        return print_jobs(target, job_filter, output, terminal)

    run_command(work)
