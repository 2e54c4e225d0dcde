"""queues and doctor: what the cluster offers."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import base

if TYPE_CHECKING:
    from kubectl_torchrun.kubectl import Target
    from kubectl_torchrun.terminal import Terminal


@click.command(cls=base.Command, short_help="List queues with running and waiting jobs")
@click.option("--all-namespaces", "-A", is_flag=True, help="Queues of all namespaces.")
@base.output_option("name", "yaml", "json")
@base.cluster_options
def queues(all_namespaces: bool, output: str, where: base.Where) -> None:
    """List the TorchrunQueues: what is used of their quota, how many of their jobs run and wait;
    and below, each job that waits to be admitted, with its place and what it waits for.

    \b
    Examples:
      kubectl torchrun queues
      kubectl torchrun queues -A
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import listing

        return listing.queues(target, listing.Choice(all_namespaces), output, terminal)

    base.run(work, where)


@click.command(cls=base.Command, short_help="Check the cluster and say what to mend")
@base.output_option("yaml", "json")
@base.cluster_options
def doctor(output: str, where: base.Where) -> None:
    """Check whether jobs can run here, and say what to mend: kinds, controller, queues, storage,
    GPUs, schedulers, your rights, Pod Security.

    Exit code 1 if something stands in the way; warnings do not count.

    \b
    Examples:
      kubectl torchrun doctor
      kubectl torchrun doctor -n team-a -o json
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import doctor

        return doctor.doctor(target, output, terminal)

    base.run(work, where)


COMMANDS = (queues, doctor)
