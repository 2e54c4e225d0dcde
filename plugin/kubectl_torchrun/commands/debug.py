"""`debug`: a breakpoint in a rank of a job that runs."""

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    local_option,
    run_command,
)
from kubectl_torchrun.cli.types import Count
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("debug", cls=Command)
@job_argument
@click.option("--rank", "-r", type=Count(0), default=0, help="Global rank. Default: 0.")
@click.option("--pdb", "is_pdb", is_flag=True, help="Use pdb on this terminal, without an editor.")
@click.option(
    "--port", type=Count(0), help="Local port for the editor. Default: 5678, or a free one."
)
@local_option
@cluster_options
def command(
    job: str, rank: int, is_pdb: bool, port: int | None, is_local: bool, target: Target
) -> None:
    """Debug a rank of JOB while it runs: in an editor, or with pdb on this terminal.

    The rank answers at its next instruction of Python. An editor needs debugpy in the environment
    of the job; pdb needs nothing. Meanwhile the hang watches of all nodes pause. At the end, even
    of the connection, the rank is detached and goes on. You need the right to exec into pods.

    \b
    Examples:
      kubectl torchrun debug my-project-x7k2p --rank 3
      kubectl torchrun debug my-project-x7k2p --rank 3 --pdb
      kubectl torchrun debug my-project-x7k2p --local
    """
    if is_pdb and port is not None:
        raise click.UsageError("--port is for an editor. Remove it, or --pdb.")

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.debugger import DebugRequest, debug

        request = DebugRequest(job, rank, is_pdb, port, is_local)
        if is_local:
            from kubectl_torchrun.local.debugger import helper_command

            return debug(helper_command(request), request, terminal)
        from kubectl_torchrun.cluster.exec_forward import find_worker
        from torchrun_api.names import LAUNCHER

        worker = find_worker(target, job, None, rank)
        words = ["python3", LAUNCHER, *request.arguments]
        return debug(worker.exec_command(words, "--stdin"), request, terminal)

    run_command(work)
