"""What the user sees: logs on stdout, all else on stderr; a spinner and a bar on terminals only."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, TextIO, TypedDict

from kubectl_torchrun.text import echo, escape, human, log_text, style

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
_PHASE_COLOURS = {"Succeeded": "green", "Failed": "red", "TimedOut": "red", "Running": "cyan"}
_QUIET_SECONDS = 5.0
_REPEAT_SECONDS = 60.0
_BAR_SECONDS = 5.0


class PhaseStyle(TypedDict):
    """How a phase looks."""

    fg: str | None
    bold: bool


class Terminal:
    """The two streams of a command. Use as a context manager: it leaves the screen clean."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._live = _is_terminal(self._err)
        self._out_colour = has_colour(self._out)
        self._err_colour = has_colour(self._err)
        self._spinner: Status | None = None
        self._barred = False
        self._waiting = ("", 0.0)

    @property
    def live(self) -> bool:
        """Whether stderr is a terminal that can be drawn on."""
        return self._live

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.at_rest()

    def note(self, text: str) -> None:
        """One line about what happens."""
        if self._spinner is not None or self._barred:
            from rich.text import Text

            self._console.print(Text.from_ansi(escape(text)), soft_wrap=True)
        else:
            echo(text, file=self._err, colour=self._err_colour)

    def transition(self, phase: str, text: str) -> None:
        """The job has entered a phase, or says something new in it."""
        self._waiting = ("", 0.0)
        padded = f"{phase:<9} " if text else phase
        self.note(style(padded, **phase_style(phase)) + text)

    def waiting(self, brief: str, text: str, seconds: float) -> None:
        """Nothing has happened for so many seconds, because of `text`, which starts with `brief`.

        A terminal shows the brief one beside a spinner, as the whole stands above it already.
        """
        if self._barred:
            return
        if self._live:
            self._spin(f"{brief} ({seconds:.0f} s)" if seconds >= _QUIET_SECONDS else brief)
            return
        before, at = self._waiting
        now = time.monotonic()
        if seconds >= _QUIET_SECONDS and (text != before or now - at >= _REPEAT_SECONDS):
            self._waiting = (text, now)
            again = f"still waiting: {brief} ({seconds:.0f} s)"
            self.note(again if text == before else f"still waiting: {text}")

    def at_rest(self) -> None:
        """Take the spinner off the screen."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def interrupted(self) -> None:
        """Go on below the `^C` that the terminal itself has written."""
        self.at_rest()
        if self._live:
            self._err.write("\n")

    def log(self, rank: int, line: bytes) -> None:
        """One line of a rank's log. Of one that draws over itself, as bars do, the end."""
        self.at_rest()
        prefix = escape(f"[{rank}]")
        if self._out_colour:
            prefix = style(prefix, fg=_COLOURS[rank % len(_COLOURS)])
        self._out.write(f"{prefix} {log_text(line, colour=self._out_colour)}\n")
        self._out.flush()

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator["Bar"]:
        """A bar over so many bytes."""
        self.at_rest()
        self._barred = self._live
        try:
            with (
                _drawn(label, total, self._console)
                if self._live
                else nullcontext(Bar(label, total, self))
            ) as bar:
                yield bar
        finally:
            self._barred = False

    @cached_property
    def _console(self) -> "Console":
        from rich.console import Console

        return Console(file=self._err, highlight=False, markup=False)

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
    """How far an upload is; `reached` bytes are taken."""

    def __init__(self, label: str, total: int, terminal: Terminal | None) -> None:
        self.label = label
        self.total = total
        self._terminal = terminal
        self._told_at = time.monotonic()

    def reached(self, size: int) -> None:
        """Says so every few seconds."""
        now = time.monotonic()
        if self._terminal is not None and now - self._told_at >= _BAR_SECONDS:
            self._told_at = now
            share = 100 * size // max(self.total, 1)
            self._terminal.note(f"{self.label}: {share} % of {human(self.total)}")


def ask(question: str) -> str:
    """The line that is typed at the terminal on stdin; empty at its end. Raises KeyboardInterrupt.

    input() may sleep through a Ctrl-C that comes just before it begins to read.
    """
    echo(f"{question} ", nl=False, file=sys.stderr)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        select.select([sys.stdin, woken], [], [])
        line = sys.stdin.readline()
        if not line.endswith("\n"):
            echo(file=sys.stderr)
        return line.strip()
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(wakes)


def phase_style(phase: str) -> "PhaseStyle":
    """Arguments for `style`."""
    return {"fg": _PHASE_COLOURS.get(phase), "bold": True}


@contextmanager
def _drawn(label: str, total: int, console: "Console") -> Iterator[Bar]:
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

        class Drawn(Bar):
            def reached(self, size: int) -> None:
                progress.update(task, completed=size)

        yield Drawn(label, total, None)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def has_colour(stream: TextIO) -> bool:
    """Whether a stream shows colours: a terminal, and its user wants them."""
    return _is_terminal(stream) and not os.environ.get("NO_COLOR")
