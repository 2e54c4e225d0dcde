"""`help`: the help of a command."""

import click

from kubectl_torchrun.cli.options import Command
from kubectl_torchrun.text import echo


@click.command("help", cls=Command)
@click.argument("command", required=False)
def command(command: str | None) -> None:
    """Show the help of COMMAND, or the list of commands.

    \b
    Example:
      kubectl torchrun help submit
    """
    outer = click.get_current_context().parent
    assert outer is not None
    group = outer.command
    assert isinstance(group, click.Group)
    if command is None:
        echo(outer.get_help())
        return
    name, shown, _ = group.resolve_command(outer, [command])
    assert shown is not None
    with click.Context(shown, info_name=name, parent=outer, **shown.context_settings) as context:
        echo(shown.get_help(context))
