"""`why`: why a job is waiting or failed."""

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


@click.command("why", cls=Command)
@job_argument
@output_option("yaml", "json")
@cluster_options
def command(job: str, output: str, target: Target) -> None:
    """Explain why JOB is waiting or failed: reason, earlier attempts, and the last log lines of
    the rank that failed first; after a hang, the stacks of all ranks.

    -o json prints for programs: phase, reason, message, failure, attempt, node, rank, machine,
    exitCode, evidence (log lines) and nextCommand.

    \b
    Examples:
      kubectl torchrun why my-project-x7k2p
      kubectl torchrun why my-project-x7k2p -o json
    """

    def work(_: Display) -> int:
        from kubectl_torchrun.logs.failure_report import print_report

        return print_report(target, job, output)

    run_command(work)
