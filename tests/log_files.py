"""Log files that another process still writes."""

from pathlib import Path


def read_complete_lines(log: Path, start: int = 0) -> list[bytes]:
    """Read the lines after a position in bytes, without the last one if its end is missing.

    The kernel copies a write page by page, so a reader may see the first part of a line.
    """
    with log.open("rb") as file:
        file.seek(start)
        return [line for line in file if line.endswith(b"\n")]


def find_end(log: Path) -> int:
    """The position in bytes after the last complete line; 0 without the file."""
    return log.read_bytes().rfind(b"\n") + 1 if log.exists() else 0
