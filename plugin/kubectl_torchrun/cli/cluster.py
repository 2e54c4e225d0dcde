"""queues and doctor: what the cluster offers."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import options

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.terminal import Terminal


@click.command(cls=options.Command, short_help="List queues with running and waiting jobs")
@click.option("--all-namespaces", "-A", is_flag=True, help="Queues of all namespaces.")
@options.output_option("name", "yaml", "json")
@options.cluster_options
def queues(all_namespaces: bool, output: str, where: options.Where) -> None:
    """List the TorchrunQueues: what is used of their quota, how many of their jobs run and wait;
    and below, each job that waits to be admitted, with its place and what it waits for.

    \b
    Examples:
      kubectl torchrun queues
      kubectl torchrun queues -A
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import listing

        return listing.queues(target, listing.Choice(all_namespaces), output, terminal)

    options.run(work, where)


@click.command(cls=options.Command, short_help="Check the cluster and say what to mend")
@options.output_option("yaml", "json")
@options.cluster_options
def doctor(output: str, where: options.Where) -> None:
    """Check whether jobs can run here, and say what to mend: kinds, controller, queues, storage,
    GPUs, schedulers, your rights, Pod Security.

    Exit code 1 if something stands in the way; warnings do not count.

    \b
    Examples:
      kubectl torchrun doctor
      kubectl torchrun doctor -n team-a -o json
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import doctor

        return doctor.doctor(target, output, terminal)

    options.run(work, where)


COMMANDS = (queues, doctor)
