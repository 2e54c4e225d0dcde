"""`queues`: tables of queues and of the jobs that wait in them."""

import click

from kubectl_torchrun.cli.options import (
    Command,
    check_watch,
    cluster_options,
    output_option,
    run_command,
    watch_option,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("queues", cls=Command)
@click.option("--all-namespaces", "-A", is_flag=True, help="List queues of all namespaces.")
@watch_option
@output_option("name", "wide", "yaml", "json")
@cluster_options
def command(all_namespaces: bool, watch: bool, output: str, target: Target) -> None:
    """List TorchrunQueues with used quota and the number of running and waiting jobs. A second
    table lists the jobs that wait for admission, with position and reason.

    \b
    Examples:
      kubectl torchrun queues
      kubectl torchrun queues -A -o wide
      kubectl torchrun queues --watch
    """
    check_watch(watch, output)

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.queue_list import print_queues

        return print_queues(target, all_namespaces, output, terminal, watch=watch)

    run_command(work)
