"""`doctor`: diagnose cluster problems."""

import click

from kubectl_torchrun.cli.options import Command, cluster_options, output_option, run_command
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("doctor", cls=Command)
@output_option("yaml", "json")
@cluster_options
def command(output: str, target: Target) -> None:
    """Diagnose cluster problems: versions, CRDs, controller, queues, storage, nodes, schedulers
    and permissions.

    It changes nothing. What you may not read is reported as not checked ("skip").

    The exit code is 1 if a check fails ("fail"). Warnings do not count.

    \b
    Examples:
      kubectl torchrun doctor
      kubectl torchrun doctor -n team-a -o json
    """

    def work(terminal: Display) -> int:
        from kubectl_torchrun.doctor.report import print_findings

        return print_findings(target, output, terminal)

    run_command(work)
