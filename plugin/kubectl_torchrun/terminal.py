"""Output for the user: logs on stdout, the rest on stderr; spinner and bars only on terminals."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, TextIO, TypedDict

import click

from kubectl_torchrun.text import accept_all_characters, echo, escape, human, log_text, style

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

COLOR_KEY = "torchrun.color"  # of the value of --color, in the meta of a context
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
# Every terminal phase has a colour; of the others only Running.
_PHASE_COLOURS = {"Succeeded": "green", "Failed": "red", "TimedOut": "red", "Running": "cyan"}
QUIET_SECONDS = 5.0  # of a state that is worth a line
_REPEAT_SECONDS = 60.0
_BAR_SECONDS = 5.0


class PhaseStyle(TypedDict):
    """Arguments of `style` for a phase."""

    fg: str | None
    bold: bool


class Display:
    """The two streams of a command. Use as a context manager: it leaves the screen clean."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        accept_all_characters(self._out)
        accept_all_characters(self._err)
        self._live = _is_terminal(self._err)
        self._out_colour = has_colour(self._out)
        self._err_colour = has_colour(self._err)
        self._spinner: Status | None = None
        self._has_bar = False
        self._noted_at = -_REPEAT_SECONDS

    @property
    def live(self) -> bool:
        """Whether stderr is a terminal that can be drawn on."""
        return self._live

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        self.at_rest()

    def note(self, text: str) -> None:
        """Print one line on stderr."""
        if self._spinner is not None or self._has_bar:
            from rich.text import Text

            self._console.print(Text.from_ansi(escape(text)), soft_wrap=True)
        else:
            echo(text, file=self._err, colour=self._err_colour)

    def transition(self, phase: str, text: str) -> None:
        """Print a new phase of the job, or a new reason or message of it."""
        self._noted_at = time.monotonic()
        padded = f"{phase:<9} " if text else phase
        self.note(style(padded, **phase_style(phase)) + text)

    def waiting(self, phase: str, text: str, seconds: float) -> None:
        """Show why the job waits: on a terminal now, else in a line every minute.

        seconds: since the last change. text: may be empty.
        """
        if self._has_bar:
            return
        since = f" ({seconds:.0f} s)" if seconds >= QUIET_SECONDS else ""
        line = f"{phase}{since}: {text}" if text else f"{phase}{since}"
        now = time.monotonic()
        if self._live:
            self._spin(line)
        elif since and now - self._noted_at >= _REPEAT_SECONDS:
            self._noted_at = now
            self.note(f"Still waiting: {line}")

    def at_rest(self) -> None:
        """Remove the spinner from the screen."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def interrupted(self) -> None:
        """Continue below the `^C` that the terminal has printed."""
        self.at_rest()
        if self._live:
            self._err.write("\n")

    def log(self, rank: int, line: bytes, *, prefix: bool = True) -> None:
        """Print one line of a log; only the end of a line that overwrites itself, such as a bar."""
        self.at_rest()
        start = f"[{rank}] "
        if self._out_colour:
            start = style(f"[{rank}]", fg=_COLOURS[rank % len(_COLOURS)]) + " "
        text = log_text(line, colour=self._out_colour)
        self._out.write(f"{start if prefix else ''}{text}\n")
        self._out.flush()

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator["Bar"]:
        """A progress bar; total: bytes."""
        self.at_rest()
        self._has_bar = self._live
        try:
            with (
                _progress_bar(label, total, self._console)
                if self._live
                else nullcontext(Bar(label, total, self))
            ) as bar:
                yield bar
        finally:
            self._has_bar = False

    @cached_property
    def _console(self) -> "Console":
        from rich.console import Console

        no_color = not self._err_colour
        return Console(file=self._err, highlight=False, markup=False, no_color=no_color)

    def _spin(self, text: str) -> None:
        from rich.text import Text

        line = Text(escape(text))
        line.truncate(max(self._console.width - 4, 8), overflow="ellipsis")
        if self._spinner is None:
            self._spinner = self._console.status(line, spinner="dots", refresh_per_second=8)
            self._spinner.start()
        else:
            self._spinner.update(line)


class Bar:
    """Progress of an upload or of packing."""

    def __init__(self, label: str, total: int, terminal: Display | None) -> None:
        self.label = label
        self.total = total
        self._terminal = terminal
        self._printed_at = time.monotonic()

    def reached(self, size: int) -> None:
        """Set the progress to `size` bytes; without a terminal, print it every few seconds."""
        now = time.monotonic()
        if self._terminal is not None and now - self._printed_at >= _BAR_SECONDS:
            self._printed_at = now
            share = 100 * size // max(self.total, 1)
            self._terminal.note(f"{self.label}: {share} % of {human(self.total)}")


def ask(question: str) -> str:
    """The line that the user types; empty at the end of stdin. Raises KeyboardInterrupt.

    input() may miss a Ctrl-C that arrives just before it starts to read.
    """
    echo(f"{question} ", nl=False, file=sys.stderr)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    before = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    try:
        select.select([sys.stdin, wake_reader], [], [])
        line = sys.stdin.readline()
        if not line.endswith("\n"):
            echo(file=sys.stderr)
        return line.strip()
    finally:
        signal.set_wakeup_fd(before)
        os.close(wake_reader)
        os.close(wake_writer)


def phase_style(phase: str) -> "PhaseStyle":
    """The colour of a phase, as arguments of `style`."""
    return {"fg": _PHASE_COLOURS.get(phase), "bold": True}


@contextmanager
def _progress_bar(label: str, total: int, console: "Console") -> Iterator[Bar]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn(True)]
    if console.width >= 72:
        columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)

        class RichBar(Bar):
            def reached(self, size: int) -> None:
                progress.update(task, completed=size)

        yield RichBar(label, total, None)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def has_colour(stream: TextIO) -> bool:
    """Whether a stream shows colours: by --color, else on a terminal without NO_COLOR."""
    context = click.get_current_context(silent=True)
    choice = context.meta.get(COLOR_KEY, "auto") if context else "auto"
    if choice != "auto":
        return choice == "always"
    return _is_terminal(stream) and not os.environ.get("NO_COLOR")
