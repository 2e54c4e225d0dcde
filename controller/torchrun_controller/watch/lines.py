"""Splitting a stream of bytes into lines."""

from typing import NamedTuple

# Bytes. etcd's default limit for an object is 1.5 MiB; larger settings exist.
MAX_LINE = 16 * 2**20
_HEAD = 64 * 2**10


class Overlong(NamedTuple):
    """A line over the limit; `head` is its first 64 KiB."""

    head: bytes


class LineSplitter:
    """Splits chunks at newlines; holds at most one line of `limit` bytes.

    aiohttp's own reader refuses the long lines of large objects. An incomplete last line is
    dropped.
    """

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, chunk: bytes) -> list[bytes | Overlong]:
        """Return the lines that these bytes complete, without newlines and empty lines."""
        lines: list[bytes | Overlong] = []
        *line_ends, rest = chunk.split(b"\n")
        for line_end in line_ends:
            self._append(line_end, lines)
            if self._parts:
                lines.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
            self._clear()
        self._append(rest, lines)
        return lines

    def _append(self, part: bytes, lines: list[bytes | Overlong]) -> None:
        if self._skipping or not part:
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._limit:
            head = b"".join(self._parts)[:_HEAD]
            self._clear()
            self._skipping = True
            lines.append(Overlong(head))

    def _clear(self) -> None:
        self._parts = []
        self._size = 0
        self._skipping = False
