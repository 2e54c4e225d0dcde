"""The manifest of a workspace, which plugin and sync pod exchange: a list of its files.

Its text has a line for each file and each empty directory, in the order of their paths:

    <sha256> <bytes> <644 or 755> <path>
    - 0 dir <path>

The SHA-256 of the text names the workspace, so the same files have the same name.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# File at the root of a workspace PVC: names the revision that is complete and should run.
MARKER = ".sync_success"
LARGEST_TEXT = 128 << 20  # bytes; 200,000 paths of 500 bytes
_MOST_LINES = 500_000  # of a difference: 200,000 paths to drop, and as many to add
_LONGEST_LINE = 8192  # bytes; a path has at most 4096


class ManifestError(ValueError):
    """The text is not a valid manifest, or not the expected one."""


class Entry(NamedTuple):
    """A file, or an empty directory (mode `dir`, no sha256). size in bytes."""

    path: str
    sha256: str
    size: int
    mode: str

    @property
    def line(self) -> str:
        """The line of the entry in the text."""
        return f"{self.sha256 or '-'} {self.size} {self.mode} {self.path}"


class Manifest:
    """The entries of a workspace, in the order of their paths' bytes."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: entry.path.encode()))
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(f"{entry.line}\n".encode())
        self.sha256 = digest.hexdigest()

    @property
    def text(self) -> str:
        """The text, which is built on each call: 32 MB of 200,000 usual paths."""
        return "".join(f"{entry.line}\n" for entry in self.entries)

    @property
    def files(self) -> int:
        """Number of files, without directories."""
        return sum(entry.mode != "dir" for entry in self.entries)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)


def parse(text: str) -> Manifest:
    """The manifest of a text. Raises ManifestError at the first invalid line."""
    return Manifest(_entry(line) for line in text.split("\n") if line)


def pack(manifest: Manifest, base: Manifest | None = None) -> bytes:
    """The compressed manifest; only the difference if the receiver has `base`.

    The first line is the SHA-256 of the base, empty without one. Then `-PATH` for each path of the
    base to drop, and `+LINE` for each line of the manifest to add.
    """
    old = {} if base is None else _by_path(base)
    new = _by_path(manifest)
    lines = [
        "" if base is None else base.sha256,
        *(f"-{path}" for path in old if path not in new),
        *(f"+{entry.line}" for path, entry in new.items() if old.get(path) != entry),
    ]
    return zlib.compress("\n".join(lines).encode(), 6)


def unpack(data: bytes, bases: Mapping[str, Manifest]) -> Manifest:
    """The manifest that `pack` turned into `data`. bases: the known manifests by sha256.

    Raises ManifestError, also if the base is unknown.
    """
    first, *lines = _lines(data)
    base = first.decode(errors="replace")
    if base and base not in bases:
        raise ManifestError(f"The pod does not have the base manifest {base:.80}.")
    entries = _by_path(bases[base]) if base else {}
    try:
        for line in lines:
            text = line.decode()
            if text.startswith("-"):
                entries.pop(text[1:], None)
            else:
                entry = _entry(text.removeprefix("+"))
                entries[entry.path] = entry
    except UnicodeDecodeError as error:
        raise ManifestError(f"The manifest has a path that is not UTF-8: {error}.") from error
    return Manifest(entries.values())


def _lines(data: bytes) -> list[bytes]:
    """The lines in the output of `pack`.

    They are counted and measured before objects are created: a reader of the job may send anything.
    """
    try:
        decompress = zlib.decompressobj()
        text = decompress.decompress(data, LARGEST_TEXT)
    except zlib.error as error:
        raise ManifestError(f"The data is not a manifest: {error}.") from error
    if decompress.unconsumed_tail or not decompress.eof or text.count(b"\n") > _MOST_LINES:
        raise ManifestError("The manifest is too large or incomplete.")
    lines = text.split(b"\n")
    if max(map(len, lines)) > _LONGEST_LINE:
        raise ManifestError("The manifest has a line that is too long.")
    return lines


def _by_path(manifest: Manifest) -> dict[str, Entry]:
    return {entry.path: entry for entry in manifest.entries}


def _entry(line: str) -> Entry:
    parts = line.split(" ", 3)
    if len(parts) != 4 or not parts[3] or "\n" in parts[3]:
        raise ManifestError(f"The manifest has an invalid line: {line!r:.200}.")
    sha256, size, mode, path = parts
    directory = mode == "dir" and sha256 == "-" and size == "0"
    file = mode in ("644", "755") and len(sha256) == 64 and not set(sha256) - _HEXADECIMAL
    if not (size.isascii() and size.isdigit() and len(size) < 16 and (directory or file)):
        raise ManifestError(f"The manifest has an invalid line: {line!r:.200}.")
    return Entry(path, "" if directory else sha256, int(size), mode)


_HEXADECIMAL = set("0123456789abcdef")
