"""`suspend`: suspend a job."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli.changes import INTERRUPTED, change_options
from kubectl_torchrun.cli.options import Command, job_argument, run_command
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.cluster.lifecycle import ChangeOptions


@click.command("suspend", cls=Command)
@job_argument
@change_options("Suspended", "name", "yaml", "json")
def command(job: str, options: "ChangeOptions", target: "Target") -> None:
    """Suspend JOB. Its pods get SIGTERM and a grace period; its PVCs are kept.

    \b
    Examples:
      kubectl torchrun suspend my-project-x7k2p
      kubectl torchrun suspend my-project-x7k2p --wait --timeout 5m
    """

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.lifecycle import change

        return change(target, "suspend", job, None, options, terminal)

    run_command(work, INTERRUPTED)
