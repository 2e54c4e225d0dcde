"""`why`: why a job waits or died."""

import click

from kubectl_torchrun.cli.options import Command, cluster_options, job_argument, run_command
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Terminal


@click.command("why", cls=Command)
@job_argument
@cluster_options
def command(job: str, target: Target) -> None:
    """Say why JOB waits or died: reason, earlier attempts, last lines of the first failed rank.

    \b
    Example:
      kubectl torchrun why my-project-x7k2p
    """

    def work(_: Terminal) -> int:
        from kubectl_torchrun.logs.failure_report import print_report

        return print_report(target, job)

    run_command(work)
