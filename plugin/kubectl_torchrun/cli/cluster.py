"""queues and doctor: what the cluster offers."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import base

if TYPE_CHECKING:
    from kubectl_torchrun.kubectl import Target
    from kubectl_torchrun.terminal import Terminal


@click.command(cls=base.Command)
@click.option("--all-namespaces", "-A", is_flag=True, help="Queues of all namespaces.")
@base.output_option("name", "yaml", "json")
@base.cluster_options
def queues(all_namespaces: bool, output: str, where: base.Where) -> None:
    """List the TorchrunQueues with weight, quota, and how many of their jobs run and wait.

    \b
    Examples:
      kubectl torchrun queues
      kubectl torchrun queues -A
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import listing

        return listing.queues(target, listing.Choice(all_namespaces), output, terminal)

    base.run(work, where)


COMMANDS = (queues,)
