"""`doctor`: check the cluster."""

import click

from kubectl_torchrun.cli.options import Command, cluster_options, output_option, run_command
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Terminal


@click.command("doctor", cls=Command)
@output_option("yaml", "json")
@cluster_options
def command(output: str, target: Target) -> None:
    """Check whether jobs can run here, and say what to mend: kinds, controller, queues, storage,
    GPUs, schedulers, your rights, Pod Security.

    Exit code 1 if something stands in the way; warnings do not count.

    \b
    Examples:
      kubectl torchrun doctor
      kubectl torchrun doctor -n team-a -o json
    """

    def work(terminal: Terminal) -> int:
        from kubectl_torchrun.cluster.doctor import print_findings

        return print_findings(target, output, terminal)

    run_command(work)
