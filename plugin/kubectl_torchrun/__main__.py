"""kubectl torchrun: the group of all commands."""

import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import defaults, options
from kubectl_torchrun.cli.types import errors_in_one_style
from kubectl_torchrun.commands import OTHER_WORDS, SHORT_HELP
from kubectl_torchrun.text import accept_all_characters, echo

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class _Commands(Mapping[str, click.Command]):
    """The commands by name. The module of a command is loaded at its first use."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in SHORT_HELP:
            raise KeyError(name)
        module = import_module(f"kubectl_torchrun.commands.{name.replace('-', '_')}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(SHORT_HELP)

    def __len__(self) -> int:
        return len(SHORT_HELP)


class _Group(click.Group):
    """Lists the commands without loading them, and suggests commands for unknown names."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises click.UsageError with a suggestion for an unknown command."""
        name = args[0]
        if name in SHORT_HELP or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        hint = OTHER_WORDS.get(name)
        if hint is None:
            import difflib

            near = difflib.get_close_matches(name, SHORT_HELP, 1)
            hint = f"Did you mean {near[0]}?" if near else "List the commands with --help."
        raise click.UsageError(f"Unknown command {name}. {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The section Commands of the help."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SHORT_HELP.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The section Exit codes of the help."""
        from torchrun_api.contract.exit_codes import PLUGIN

        with formatter.section("Exit codes"):
            formatter.write_dl(
                [(str(status.codes.start), _plain(status.meaning)) for status in PLUGIN]
            )

    def invoke(self, ctx: click.Context) -> object:
        """Raises usage errors in the style of other errors."""
        with errors_in_one_style():
            return super().invoke(ctx)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """Raises usage errors in the style of other errors.

        An argument that is not UTF-8 is one: it could not be sent to the API server.
        """
        with errors_in_one_style():
            foreign = next((arg for arg in args if not _is_unicode(arg)), None)
            if foreign is not None:
                text = foreign.encode(errors="backslashreplace").decode()
                raise click.UsageError(f"The argument {text} is not UTF-8. Rename the file.")
            return super().make_context(info_name, args, parent, **extra)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Names of commands with their short help, and the group's own flags."""
        from click.shell_completion import CompletionItem

        names = [name for name in sorted(SHORT_HELP) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=SHORT_HELP[name]) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)


def _is_unicode(text: str) -> bool:
    """Whether the text has no bytes of another encoding, which Python keeps as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _plain(markdown: str) -> str:
    """The text without Markdown marks of code and links."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from kubectl_torchrun.version import version_line

        echo(version_line())
        ctx.exit()


@click.group(
    cls=_Group,
    commands=_Commands(),
    context_settings=options.CONTEXT_SETTINGS,
)
@click.option(
    "--version",
    "-v",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@defaults.option()
@options.plain_cluster_options
def cli(kubeconfig: str, context: str, namespace: str) -> None:
    """Run the code in the current directory with torchrun on many nodes of a cluster.

    \b
    Examples:
      cd my-project
      kubectl torchrun run --gpus 16 "python train.py --epochs 10"
      kubectl torchrun list
      kubectl torchrun logs my-project-x7k2p --follow

    Defaults for flags come from torchrun.toml in this directory or a parent.
    """


def main() -> None:
    """Entry point of kubectl-torchrun."""
    accept_all_characters(sys.stdout)
    accept_all_characters(sys.stderr)
    cli(prog_name="kubectl torchrun")


if __name__ == "__main__":
    main()
