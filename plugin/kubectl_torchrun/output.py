"""Output for programs (-o) and tables."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from kubectl_torchrun.terminal import has_colour
from kubectl_torchrun.text import echo, escape, join
from torchrun_api.json import JsonObject, JsonValue

GAP = "   "
WIDE = "wide"  # the format of a table with more columns that is not cut


def name_of(body: JsonObject) -> str:
    """`torchrunjob.torchrun.ai/NAME`, as kubectl writes it."""
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    kind = str(body.get("kind", "TorchrunJob")).lower()
    return f"{kind}.torchrun.ai/{metadata['name']}"


def write(body: JsonObject, output: str) -> None:
    """Print an object, or a List of them, as name, json or yaml."""
    if output == "name":
        items = body.get("items")
        listed: list[JsonValue] = items if isinstance(items, list) else [body]
        text = "".join(f"{name_of(item)}\n" for item in listed if isinstance(item, dict))
    elif output == "json":
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
    else:
        import yaml

        text = yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
    put(text)


def put(text: str) -> None:
    """Print text for programs unchanged, as UTF-8; on a terminal, without control characters."""
    if sys.stdout.isatty():
        sys.stdout.write(escape(text))
    else:
        sys.stdout.flush()
        put_bytes(text.encode(errors="backslashreplace"))
    sys.stdout.flush()


def put_bytes(content: bytes) -> None:
    """Print content for programs unchanged."""
    sys.stdout.buffer.write(content)


def without_noise(body: JsonObject) -> JsonObject:
    """The object as kubectl prints it: without managedFields."""
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        metadata = {key: value for key, value in metadata.items() if key != "managedFields"}
        return {**body, "metadata": metadata}
    return body


def columns(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    spare: Sequence[str] = (),
) -> list[str]:
    """Aligned lines, starting with the head.

    To fit in `width`, columns in `spare` are removed in that order; then the last column is cut
    with an ellipsis. width: None for no limit.
    """
    table = [[*head], *([str(escape(" ".join(cell.split()))) for cell in row] for row in rows)]
    removable = list(spare)
    while width and removable and _required_width(table) > width:
        name = removable.pop(0)
        if name in table[0]:
            at = table[0].index(name)
            table = [row[:at] + row[at + 1 :] for row in table]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = [
        GAP.join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [cut(line, width) for line in lines]


def cut(line: str, width: int | None) -> str:
    """The line, at most `width` characters long; an ellipsis replaces a cut end."""
    return line if not width or len(line) <= width else line[: max(width - 1, 0)] + "…"


def _required_width(table: list[list[str]]) -> int:
    """The width with at least 24 characters of the last column."""
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    last = min(widths[-1], 24) if table[0] else 0
    return sum(widths[:-1]) + last + len(GAP) * (len(widths) - 1)


def screen_width() -> int | None:
    """Columns of the terminal on stdout; None if stdout is not a terminal."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def age(since: datetime | None, now: datetime | None = None) -> str:
    """The age in the format of kubectl: 45s, 3m20s, 5h, 2d."""
    if since is None:
        return ""
    if since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    seconds = int(((now or datetime.now(UTC)) - since).total_seconds())
    return duration(max(seconds, 0))


def duration(seconds: int) -> str:
    """A duration in one unit, or in two if the larger is small."""
    if seconds < 120:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours, rest = divmod(minutes, 60)
    if hours < 8:
        return f"{hours}h{rest}m" if rest else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{hours // 24}d"


def print_lines(lines: Sequence[str]) -> None:
    """Print lines on stdout, with colours if it shows them."""
    echo(join(lines), colour=has_colour(sys.stdout))
