"""Text that is safe on a terminal: foreign text is escaped, only the plugin's colours remain.

All output passes through `escape` or `log_text`.
"""

import io
import re
import sys
from collections.abc import Sequence
from typing import TextIO

import click

# Control characters except tab and newline, and characters that reorder or break a line.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours and movements of the cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links, the clipboard
    r"|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
# SGR without the private parameters of `ESC[>4;2m`, which changes what the keyboard sends.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RESET = "\x1b[0m"


class Styled(str):
    """Text without control characters except the colours of `style`.

    Text that is added to it is escaped. An f-string makes it plain text, whose colours are escaped.
    """

    __slots__ = ()

    def __add__(self, other: str) -> "Styled":
        return Styled(str.__add__(self, escape(other)))


def accept_all_characters(stream: TextIO) -> None:
    """Make a stream print characters that its encoding lacks as escape sequences.

    A terminal or a pipe may have another encoding than UTF-8.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def escape(text: str) -> Styled:
    """The text with control characters as escape sequences, for example `\\u001b`."""
    if isinstance(text, Styled):
        return text
    return Styled(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def style(text: str, *, fg: str | None = None, bold: bool | None = None) -> Styled:
    """Escaped text in a colour."""
    return Styled(click.style(escape(text), fg=fg, bold=bold))


def join(lines: Sequence[str]) -> Styled:
    """Escaped lines, joined by newlines."""
    return Styled("\n".join(escape(line) for line in lines))


def log_text(line: bytes, *, colour: bool) -> Styled:
    """A line of a log without control sequences; with `colour`, its colours stay.

    Of a line that overwrites itself, as progress bars do, only the end.
    """
    text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
    coloured = _SEQUENCE.sub(lambda match: _colour(match[0]) if colour else "", text)
    return Styled(coloured + _RESET if "\x1b" in coloured else coloured)


def echo(
    text: str = "", *, file: TextIO | None = None, nl: bool = True, colour: bool | None = None
) -> None:
    """Print on stdout or `file`. colour: keep colours; None: only on a terminal."""
    click.echo(escape(text), file=file or sys.stdout, nl=nl, color=colour)


def _colour(sequence: str) -> str:
    return sequence if _COLOUR.fullmatch(sequence) else ""


def files_of(count: int) -> str:
    """`1 file`, `1,200 files`."""
    return f"{count:,} file{'s' * (count != 1)}"


def human(size: int) -> str:
    """Bytes with a unit: `1.5 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
