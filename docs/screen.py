"""Reads a recording of a terminal, and plays it on a screen.

The format is asciicast v2: a header, then events [seconds, code, data], each on a line of JSON
(https://docs.asciinema.org/manual/asciicast/v2/). A marker stands before each command.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n])|([^\x1b\r\n]+)")
_INDEXED = re.compile(r"38;5;(\d+)")  # one of 256 colours
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ON = {1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "reverse"}
_OFF = {22: ("bold", "dim"), 23: ("italic",), 24: ("underline",), 27: ("reverse",)}


class Event(NamedTuple):
    """code: o for output, m for a marker."""

    seconds: float
    code: str
    data: str


class Cell(NamedTuple):
    """A character and its style, as names of colours and attributes."""

    character: str
    style: frozenset[str] = frozenset()


BLANK = Cell(" ")


class Span(NamedTuple):
    """Characters of one style from a column on."""

    column: int
    text: str
    style: frozenset[str]


@dataclass
class Line:
    """A line of the screen. seconds: when it took its present content."""

    seconds: float = 0.0
    marker: str = ""
    cells: list[Cell] = field(default_factory=list)

    def text(self) -> str:
        """The characters without blanks at the end."""
        return "".join(cell.character for cell in self.cells).rstrip()

    def spans(self) -> Iterator[Span]:
        """The characters by style, without those that are blank."""
        column = 0
        for style, group in groupby(self.cells, key=lambda cell: cell.style):
            text = "".join(cell.character for cell in group)
            if text.strip():
                indent = len(text) - len(text.lstrip())
                yield Span(column + indent, text.strip(), style)
            column += len(text)


def read(recording: Path) -> tuple[int, list[Event]]:
    """The columns of the terminal, and the events."""
    header, *events = map(json.loads, recording.read_text(encoding="utf-8").splitlines())
    return int(header["width"]), [Event(*event) for event in events]


class Screen:
    """A terminal without a bottom: lines are never scrolled away.

    It knows the control sequences of a line-oriented program: colours, carriage return, cursor up,
    erase. Raises ValueError for any other, because the picture would be wrong.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._lines = [Line()]
        self._row = self._column = 0
        self._style: frozenset[str] = frozenset()
        self._marker = ""

    @classmethod
    def play(cls, columns: int, events: list[Event]) -> list[Line]:
        """The lines after all events, without blank ones at the end."""
        screen = cls(columns)
        for event in events:
            screen.take(event)
        while screen._lines and not screen._lines[-1].text():
            screen._lines.pop()
        return screen._lines

    def take(self, event: Event) -> None:
        """Print the output of an event, or keep its marker for the next line."""
        if event.code == "m":
            self._marker = event.data
            return
        before = [line.text() for line in self._lines]
        position = 0
        while position < len(event.data):
            token = _TOKEN.match(event.data, position)
            if token is None:
                raise ValueError(f"unknown control sequence: {event.data[position:][:20]!r}")
            position = token.end()
            self._interpret(*token.groups())
        for row, line in enumerate(self._lines):
            if row >= len(before) or line.text() != before[row]:
                line.seconds = event.seconds

    def _interpret(
        self, parameters: str | None, command: str | None, control: str | None, text: str | None
    ) -> None:
        if text is not None:
            for character in text:
                self._write(character)
        elif control == "\r":
            self._column = 0
        elif control == "\n":
            self._down()
        elif command is not None:
            self._control(parameters or "", command)

    def _write(self, character: str) -> None:
        if self._column == self._columns:
            self._column = 0
            self._down()
        line = self._lines[self._row]
        if self._marker:
            line.marker, self._marker = self._marker, ""
        line.cells += [BLANK] * (self._column + 1 - len(line.cells))
        line.cells[self._column] = Cell(character, self._style)
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append(Line())

    def _control(self, parameters: str, command: str) -> None:
        if command == "m":
            indexed = _INDEXED.fullmatch(parameters)
            for code in [] if indexed else parameters.split(";"):
                self._set_style(int(code or 0))
            if indexed:
                self._style = self._style - frozenset(_COLOURS) | {f"colour-{indexed[1]}"}
        elif command == "A":
            self._row = max(self._row - int(parameters or 1), 0)
        elif command == "K":
            cells = self._lines[self._row].cells
            del cells[0 if parameters == "2" else self._column :]
        elif (parameters, command) not in (("?25", "l"), ("?25", "h")):  # the cursor is not drawn
            raise ValueError(f"unknown control sequence: {parameters}{command}")

    def _set_style(self, code: int) -> None:
        colours = frozenset(_COLOURS)
        if code == 0:
            self._style = frozenset()
        elif code in _ON:
            self._style |= {_ON[code]}
        elif code in _OFF:
            self._style -= frozenset(_OFF[code])
        elif 30 <= code <= 37 or 90 <= code <= 97:
            self._style = self._style - colours | {_COLOURS[code % 10]}
        elif code == 39:
            self._style -= colours
        else:
            raise ValueError(f"unknown style: {code}")
