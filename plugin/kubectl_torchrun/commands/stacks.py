"""`stacks`: the Python stacks of all ranks."""

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    local_option,
    output_option,
    run_command,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("stacks", cls=Command)
@job_argument
@local_option
@output_option("json", "yaml")
@cluster_options
def command(job: str, is_local: bool, output: str, target: Target) -> None:
    """Print what every rank of JOB does now: the Python stacks of its threads.

    Ranks with equal stacks are printed once, the rank that differs first. The run is not disturbed:
    each Python writes its stacks itself and continues. You need the right to exec into pods.

    \b
    Examples:
      kubectl torchrun stacks my-project-x7k2p
      kubectl torchrun stacks my-project-x7k2p -o json
      kubectl torchrun stacks my-project-x7k2p --local
    """

    def work(terminal: Display) -> int:
        if is_local:
            from kubectl_torchrun.local import stacks

            return stacks.print_stacks(job, output)
        from kubectl_torchrun.logs.stacks import print_stacks

        return print_stacks(target, job, output, terminal)

    run_command(work)
