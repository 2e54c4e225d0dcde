"""`cancel`: delete jobs."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import complete
from kubectl_torchrun.cli.changes import change_options
from kubectl_torchrun.cli.options import Command, run_command
from kubectl_torchrun.cli.types import JOB
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.cluster.lifecycle import ChangeOptions


@click.command("cancel", cls=Command)
@click.argument(
    "jobs", nargs=-1, required=True, type=JOB, metavar="JOB...", shell_complete=complete.jobs
)
@click.option("--yes", "-y", is_flag=True, help="Skip the confirmation.")
@change_options("Deleted", "name")
def command(jobs: tuple[str, ...], yes: bool, options: "ChangeOptions", target: "Target") -> None:
    """Delete jobs with their pods and PVCs. Retained PVCs, such as checkpoints, are kept.

    If a JOB does not exist, the others are deleted and the exit code is 1.

    \b
    Examples:
      kubectl torchrun cancel my-project-x7k2p
      kubectl torchrun cancel my-project-x7k2p other-run --yes --wait --timeout 2m
    """
    if options.wait not in ("", "Deleted", "deleted"):
        raise click.UsageError("cancel accepts only --wait=Deleted.")

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.lifecycle import cancel

        return cancel(target, jobs, options, terminal, sure=yes)

    run_command(work, "; only the jobs listed above were deleted")
