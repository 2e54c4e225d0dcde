"""`scale`: change the number of nodes of a job."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli.changes import INTERRUPTED, change_options
from kubectl_torchrun.cli.options import Command, job_argument, run_command
from kubectl_torchrun.cli.types import Count
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.cluster.lifecycle import ChangeOptions


@click.command("scale", cls=Command)
@job_argument
@click.option("--nodes", required=True, type=Count(1), help="Number of nodes.")
@change_options("Running", "name", "yaml", "json")
def command(job: str, nodes: int, options: "ChangeOptions", target: "Target") -> None:
    """Change the number of nodes of JOB, which must be elastic or not started yet.

    A running job continues from its checkpoint in a new gang. This does not count as a restart.

    \b
    Examples:
      kubectl torchrun scale my-project-x7k2p --nodes 4
      kubectl torchrun scale my-project-x7k2p --nodes 4 --dry-run
    """

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.lifecycle import change

        return change(target, "scale", job, nodes, options, terminal)

    run_command(work, INTERRUPTED)
