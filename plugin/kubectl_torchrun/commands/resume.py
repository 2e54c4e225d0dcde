"""`resume`: resume a suspended job."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli.changes import INTERRUPTED, change_options
from kubectl_torchrun.cli.options import Command, job_argument, run_command
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.cluster.lifecycle import ChangeOptions


@click.command("resume", cls=Command)
@job_argument
@change_options("Running", "name", "yaml", "json")
def command(job: str, options: "ChangeOptions", target: "Target") -> None:
    """Resume a suspended JOB. It starts a new gang on the same workspace.

    \b
    Examples:
      kubectl torchrun resume my-project-x7k2p
      kubectl torchrun resume my-project-x7k2p --wait=Running
    """

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.lifecycle import change

        return change(target, "resume", job, None, options, terminal)

    run_command(work, INTERRUPTED)
