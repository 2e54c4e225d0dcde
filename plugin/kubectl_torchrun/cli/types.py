"""Types of arguments and flags, and usage errors: each says what to write."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import click
from click.exceptions import NoArgsIsHelpError

from kubectl_torchrun.text import echo

_MOST = 2**31 - 1  # of an int32, as of most fields of Kubernetes
_KINDS = re.compile(r"(torchrunjobs?|tjs?)(\.torchrun\.ai)?/")


class Count(click.ParamType["int"]):
    """A whole number, at least `least`."""

    name = "integer"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """The number."""
        text = str(value)
        if not re.fullmatch(r"[+-]?\d{1,1000}", text, re.ASCII):
            self.fail(f"{text or 'An empty text'} is not a whole number.", param, ctx)
        if int(text) < self.least:
            self.fail(f"{text} is too small. The smallest value is {self.least}.", param, ctx)
        if int(text) > _MOST:
            self.fail(f"{text} is too large. The largest value is {_MOST}.", param, ctx)
        return int(text)


class OneOf(click.Choice[str]):
    """One of these words. An empty default stands for none of them."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """The word."""
        if value == "" and param is not None and param.default == "":
            return ""
        return super().convert(value, param, ctx)

    def get_invalid_choice_message(self, value: object, ctx: click.Context | None) -> str:
        """The message with the words."""
        return f"{value or 'An empty text'} is not one of {', '.join(self.choices)}."


class JobName(click.ParamType["str"]):
    """The name of a job, or what `-o name` prints: `torchrunjob.torchrun.ai/NAME`."""

    name = "job"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """The name."""
        name = _KINDS.sub("", str(value), count=1)
        if not name or "/" in name:
            subject = name or "An empty text"
            self.fail(f"{subject} is not the name of a job. See: kubectl torchrun list", param, ctx)
        return name


class Duration(click.ParamType["float"]):
    """Seconds, or a duration in the format of kubectl, with days: 90, 90s, 5m, 1h30m, 5d."""

    name = "duration"
    _UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}  # noqa: RUF012

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds, more than zero."""
        text = str(value)
        if re.fullmatch(r"\d+(\.\d+)?", text):
            seconds = float(text)
        elif re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
            parts = re.findall(r"([\d.]+)([dhms])", text)
            seconds = sum(float(number) * self._UNITS[unit] for number, unit in parts)
        else:
            subject = text or "An empty text"
            self.fail(
                f"{subject} is not a duration. Use for example 90s, 5m, 1h30m or 5d.", param, ctx
            )
        if not 0 < seconds <= _MOST:
            problem = "must be greater than 0" if seconds <= 0 else f"is more than {_MOST} s"
            self.fail(f"{text} {problem}.", param, ctx)
        return seconds


DURATION = Duration()
JOB = JobName()


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
