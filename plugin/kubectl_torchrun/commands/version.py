"""`version`: the version of this plugin."""

import click

from kubectl_torchrun.cli.options import Command
from kubectl_torchrun.text import echo
from kubectl_torchrun.version import version_line


@click.command("version", cls=Command)
def command() -> None:
    """Show the version of this plugin. doctor also shows that of the controller.

    \b
    Example:
      kubectl torchrun version
    """
    echo(version_line())
