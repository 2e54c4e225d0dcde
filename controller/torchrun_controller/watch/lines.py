"""Lines out of a stream of bytes."""

from typing import NamedTuple

# etcd's default keeps an object under 1.5 MiB; its managedFields and a larger setting need room.
MAX_LINE = 16 * 2**20
_HEAD = 64 * 2**10


class Overlong(NamedTuple):
    """A line over the limit, of which only the beginning was kept."""

    head: bytes


class LineSplitter:
    """Splits at newlines, whatever the chunks; holds at most one line of `limit` bytes.

    aiohttp's own reader refuses lines that a large object makes. A line that the stream does not
    end, because it broke, never comes out.
    """

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, chunk: bytes) -> list[bytes | Overlong]:
        """Take bytes, give the lines that they complete. Empty lines are left out."""
        lines: list[bytes | Overlong] = []
        *ended, rest = chunk.split(b"\n")
        for end in ended:
            self._append(end, lines)
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
