"""`exec`: a command or a shell in the trainer container of a node."""

import sys

import click

from kubectl_torchrun.cli.options import Command, cluster_options, job_argument, run_command
from kubectl_torchrun.cli.types import Count
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display

SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash || exec sh")


@click.command("exec", cls=Command)
@job_argument
@click.argument("command", nargs=-1)
@click.option("--node", type=Count(0), help="Node by its index. Default: 0.")
@click.option("--rank", "-r", type=Count(0), help="Node that runs this global rank.")
@click.option("--stdin", "-i", is_flag=True, help="Pass stdin to COMMAND.")
@click.option(
    "--tty/--no-tty",
    "-t",
    default=None,
    help="Allocate a terminal. Default: if stdin and stdout are terminals.",
)
@cluster_options
def command(
    job: str,
    command: tuple[str, ...],
    node: int | None,
    rank: int | None,
    stdin: bool,
    tty: bool | None,
    target: Target,
) -> None:
    """Run COMMAND, or a shell, in the trainer container of a node of JOB.

    The exit code is that of COMMAND.

    \b
    Examples:
      kubectl torchrun exec my-project-x7k2p
      kubectl torchrun exec my-project-x7k2p --node 1 -- nvidia-smi
      kubectl torchrun exec my-project-x7k2p --rank 3 -- py-spy dump --subprocesses --pid 1
    """
    if node is not None and rank is not None:
        raise click.UsageError("--node and --rank are mutually exclusive.")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with_terminal = at_terminal if tty is None else tty
    flags = ["--stdin"] * (stdin or with_terminal) + ["--tty"] * with_terminal

    def work(_: Display) -> int:
        from kubectl_torchrun.cluster.exec_forward import find_worker, replace_process

        worker = find_worker(target, job, node, rank)
        replace_process(worker.exec_command(command or SHELL, *flags))

    run_command(work)
