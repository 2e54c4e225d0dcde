"""`checkpoint`: ask all ranks to save and go on."""

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    local_option,
    run_command,
)
from kubectl_torchrun.cli.types import DURATION
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("checkpoint", cls=Command)
@job_argument
@local_option
@click.option(
    "--timeout",
    type=DURATION,
    default="5m",
    metavar="DURATION",
    help="Time limit until the new checkpoint is reported, for example 90s or 1h30m. Default: 5m.",
)
@cluster_options
def command(job: str, is_local: bool, timeout: float, target: Target) -> None:
    """Ask all ranks of JOB to save a checkpoint now and to go on.

    Their loop calls torchrun_progress.stopping() once a step. All ranks see
    torchrun_progress.save_requested() after the same call. You need the right to exec into pods.

    \b
    Examples:
      kubectl torchrun checkpoint my-project-x7k2p
      kubectl torchrun checkpoint my-project-x7k2p --local
    """

    def work(terminal: Display) -> int:
        if is_local:
            from kubectl_torchrun.local import checkpoint

            return checkpoint.request_checkpoint(job, timeout, terminal)
        from kubectl_torchrun.logs.checkpoint import request_checkpoint

        return request_checkpoint(target, job, timeout, terminal)

    run_command(work)
