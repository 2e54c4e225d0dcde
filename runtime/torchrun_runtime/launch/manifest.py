"""The manifest of a workspace, in the text format of torchrun_api.contents."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A file, or an empty directory (no sha256, mode 0). size in bytes."""

    path: str
    sha256: str
    size: int
    mode: int

    @property
    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.mode != 0


def parse(text: str) -> list[Entry]:
    """The entries in the order of the lines. Raises ValueError at an invalid line."""
    return [_entry(line) for line in text.split("\n") if line]


def _entry(line: str) -> Entry:
    sha256, size, mode, path = line.split(" ", 3)
    if mode == "dir":
        return Entry(path, "", 0, 0)
    return Entry(path, sha256, int(size), int(mode, 8))
