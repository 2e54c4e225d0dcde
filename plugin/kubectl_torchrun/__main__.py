"""kubectl torchrun: the group of all commands."""

import click

from kubectl_torchrun.cli import change, cluster, look, options, pods, submit


@click.group(context_settings=options.CONTEXT_SETTINGS, epilog=options.EXIT_CODES)
@click.version_option(package_name="kubectl-torchrun", prog_name="kubectl torchrun")
@options.bare_cluster_options
def cli(kubeconfig: str, context: str, namespace: str) -> None:
    """Run the code in the current directory with torchrun on many nodes of a cluster.

    \b
    Examples:
      cd my-project
      kubectl torchrun run --gpus 16 "python train.py --epochs 10"
      kubectl torchrun list
      kubectl torchrun logs my-project-x7k2p --follow

    Defaults of flags are taken from torchrun.toml in this directory or above it.
    """


for _module in (submit, look, change, pods, cluster):
    for _command in _module.COMMANDS:
        cli.add_command(_command)


def main() -> None:
    """Entry point of kubectl-torchrun."""
    cli(prog_name="kubectl torchrun")


if __name__ == "__main__":
    main()
