"""exec and port-forward: into a run's pods."""

import re
import sys
from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import options

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.terminal import Terminal

_PORTS = re.compile(r"(\d*:)?\d+")


@click.command(
    "exec", cls=options.Command, short_help="Run a command or a shell in a node's container"
)
@options.job_argument
@click.argument("command", nargs=-1)
@click.option("--node", type=click.IntRange(min=0), help="Which node (worker). Default: 0.")
@click.option("--rank", "-r", type=click.IntRange(min=0), help="The node that has this rank.")
@click.option("--stdin", "-i", is_flag=True, help="COMMAND reads this stdin; a terminal it does.")
@click.option(
    "--tty/--no-tty",
    "-t",
    default=None,
    help="Whether COMMAND gets a terminal. Default: where there is one.",
)
@options.cluster_options
def exec_(
    job: str,
    command: tuple[str, ...],
    node: int | None,
    rank: int | None,
    stdin: bool,
    tty: bool | None,
    where: options.Where,
) -> None:
    """Run COMMAND (default: a shell) in the trainer container of a node of JOB.

    The exit code is COMMAND's.

    \b
    Examples:
      kubectl torchrun exec my-project-x7k2p
      kubectl torchrun exec my-project-x7k2p --node 1 -- nvidia-smi
      kubectl torchrun exec my-project-x7k2p --rank 3 -- py-spy dump --pid 1
    """
    if node is not None and rank is not None:
        raise click.UsageError("Give --node or --rank, not both.")
    seen = sys.stdin.isatty() and sys.stdout.isatty()
    terminals = seen if tty is None else tty
    flags = ["--stdin"] * (stdin or terminals) + ["--tty"] * terminals

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import exec_forward

        return exec_forward.execute(target, job, node, rank, command, flags)

    options.run(work, where)


@click.command(
    "port-forward", cls=options.Command, short_help="Forward ports, or TensorBoard, from a node"
)
@options.job_argument
@click.argument("ports", nargs=-1, metavar="[LOCAL:]PORT...")
@click.option("--node", type=click.IntRange(min=0), default=0, help="Which node. Default: 0.")
@click.option("--address", default="localhost", show_default=True, help="As for kubectl.")
@click.option(
    "--tensorboard", metavar="DIR", help="Run TensorBoard in the pod on this directory of it."
)
@options.cluster_options
def port_forward(
    job: str,
    ports: tuple[str, ...],
    node: int,
    address: str,
    tensorboard: str | None,
    where: options.Where,
) -> None:
    """Forward local ports to a node of JOB until Ctrl-C.

    With --tensorboard the port is 6006 unless one is given, and TensorBoard ends with the command.

    \b
    Examples:
      kubectl torchrun port-forward my-project-x7k2p 8000
      kubectl torchrun port-forward my-project-x7k2p --tensorboard /checkpoints/runs
      kubectl torchrun port-forward my-project-x7k2p --tensorboard /app/runs 6007:6006
    """
    for port in ports:
        if not _PORTS.fullmatch(port):
            raise click.UsageError(f"{port!r} is no port; write 8000 or 9000:8000.")
    if tensorboard is None and not ports:
        raise click.UsageError("Say which port, as 8000 or 9000:8000; or --tensorboard DIR.")
    if tensorboard is not None and len(ports) > 1:
        raise click.UsageError("TensorBoard has one port.")

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import exec_forward

        if tensorboard is None:
            return exec_forward.forward(target, job, node, ports, address)
        port = ports[0] if ports else str(exec_forward.TENSORBOARD_PORT)
        return exec_forward.tensorboard(target, job, node, tensorboard, port, address, terminal)

    options.run(work, where)


COMMANDS = (exec_, port_forward)
