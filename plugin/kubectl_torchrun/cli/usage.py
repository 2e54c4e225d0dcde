"""Usage errors in the style of other errors: `Error: MESSAGE`, then the next step."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import click
from click.exceptions import NoArgsIsHelpError

from kubectl_torchrun.text import echo


class _Mistake(click.UsageError):
    """A usage error without click's three lines of usage above it."""

    def show(self, file: IO[str] | None = None) -> None:
        """Print the message, and the command that prints the help."""
        echo(f"Error: {self.format_message()}", file=sys.stderr)
        if self.ctx is not None:
            echo(f"See: {self.ctx.command_path} --help", file=sys.stderr)


@contextmanager
def errors_in_one_style() -> Iterator[None]:
    """Turn click's usage errors into errors in the style of the plugin."""
    try:
        yield
    except (NoArgsIsHelpError, _Mistake):
        raise
    except click.UsageError as error:
        raise _Mistake(error.format_message(), error.ctx) from error
