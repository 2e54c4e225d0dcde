"""`selftest`: jobs that break on purpose, and a report of what this cluster makes of them."""

from pathlib import Path

import click

from kubectl_torchrun.cli import complete
from kubectl_torchrun.cli.options import Command, cluster_options, run_command
from kubectl_torchrun.cli.types import Count
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.terminal import Display


@click.command("selftest", cls=Command)
@click.option(
    "--queue",
    "-q",
    default="",
    help="TorchrunQueue. Default: the only queue in the namespace.",
    shell_complete=complete.queues,
)
@click.option("--nodes", type=Count(1), default=2, show_default=True, help="Number of nodes.")
@click.option(
    "--gpus",
    type=Count(0),
    help="Total number of GPUs, spread evenly over nodes; 0 for CPUs. Default: those of the queue.",
)
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False),
    default=".",
    metavar="DIR",
    help="Directory of the report. Default: the current one.",
)
@cluster_options
def command(queue: str, nodes: int, gpus: int | None, output_dir: str, target: Target) -> None:
    """Test on this cluster what jobs need, and write a report that can be sent in an issue.

    Five small jobs measure all-reduces, lose a rank, a pod and a hung rank, and are suspended and
    resumed. They are deleted afterwards. It takes about five minutes, at most 20.

    The report, torchrun-selftest-DATE.json and .html, has results, versions and the GPU, and no
    names or addresses of the cluster. The exit code is 1 if a check fails. Ctrl-C deletes the job
    and writes the report of the checks before it.

    \b
    Examples:
      kubectl torchrun selftest --queue gpu
      kubectl torchrun selftest --queue gpu --nodes 4 --gpus 32
    """

    def work(terminal: Display) -> int:
        from kubectl_torchrun.selftest.selftest import SelftestOptions, selftest

        each, rest = (None, 0) if gpus is None else divmod(gpus, nodes)
        if rest:
            raise UsageProblem(f"--gpus {gpus} cannot be spread evenly over {nodes} nodes.")
        options = SelftestOptions(queue, nodes, each, Path(output_dir))
        return selftest(target, options, terminal)

    run_command(work)
