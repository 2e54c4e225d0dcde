"""Archives that must be refused: one class of hostile member each, among valid members."""

import io
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

# Patterns of messages.
NAME = "has a control character|backslash|absolute path|has the component|not UTF-8"
TYPE = "is a symbolic link|is neither a file nor|is a directory"
TWICE = "is in the archive twice|is both a file and a directory"
LONG = "of more than \\d+ bytes"
DEEP = "more than \\d+ levels deep"
LARGE = "The limit is|has more than \\d+ entries"
BOMB = "decompression bomb"
METHOD = "uses compression method"
ENCRYPTED = "is encrypted"
OVERLAP = "shares its bytes"
DAMAGED = "is damaged|does not have the \\d+ bytes"
NOT_A_ZIP = "not a valid zip archive"

CENTRAL = b"PK\x01\x02"
LOCAL = b"PK\x03\x04"


@dataclass(frozen=True)
class Hostile:
    """add: puts the member in; patch: works on the finished bytes; words: of the refusal."""

    words: str
    add: Callable[[zipfile.ZipFile], None] | None = None
    patch: Callable[[bytes], bytes] | None = None


def entry(name: str, content: bytes = b"x", mode: int = 0, **fields: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("placeholder")
    info.filename = name
    info.external_attr = mode << 16
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def named(name: str) -> Callable[[zipfile.ZipFile], None]:
    return lambda archive: archive.writestr(entry(name), b"x")


def typed(mode: int, name: str = "node") -> Callable[[zipfile.ZipFile], None]:
    return lambda archive: archive.writestr(entry(name, mode=mode | 0o644), b"/etc/passwd")


def twice(first: str, second: str) -> Callable[[zipfile.ZipFile], None]:
    def add(archive: zipfile.ZipFile) -> None:
        archive.writestr(entry(first), b"" if first.endswith("/") else b"1")
        archive.writestr(entry(second), b"" if second.endswith("/") else b"2")

    return add


def compressed(method: int) -> Callable[[zipfile.ZipFile], None]:
    return lambda archive: archive.writestr(entry("packed"), b"x" * 1000, compress_type=method)


def patched(offset: int, layout: str, change: Callable[[int], int]) -> Callable[[bytes], bytes]:
    """Change one field of the last central header; `offset` bytes from its start."""

    def patch(archive: bytes) -> bytes:
        at = archive.rfind(CENTRAL) + offset
        (value,) = struct.unpack_from(layout, archive, at)
        changed = bytearray(archive)
        struct.pack_into(
            layout, changed, at, change(value) & (2 ** (8 * struct.calcsize(layout)) - 1)
        )
        return bytes(changed)

    return patch


def rename_raw(replacement: bytes, flags: int = 0) -> Callable[[bytes], bytes]:
    """Give the member PLACEHOLDER another name of the same length, in both headers."""

    def patch(archive: bytes) -> bytes:
        changed = bytearray(archive.replace(b"PLACEHOLDER", replacement.ljust(11, b"_")))
        struct.pack_into("<H", changed, changed.rfind(CENTRAL) + 8, flags)
        struct.pack_into("<H", changed, changed.rfind(LOCAL) + 6, flags)
        return bytes(changed)

    return patch


def rename_inside(archive: bytes) -> bytes:
    """Give the member PLACEHOLDER a name in its local header alone. It claims to be UTF-8."""
    at = archive.rfind(LOCAL)
    changed = bytearray(archive)
    struct.pack_into("<H", changed, at + 6, 0x800)
    changed[at + 30 : at + 32] = b"\xff\xfe"
    return bytes(changed)


def share_bytes(archive: bytes) -> bytes:
    """Repeat the last central header under another name; both point to the same member."""
    at = archive.rfind(CENTRAL)
    end = archive.rfind(b"PK\x05\x06")
    header = bytearray(archive[at:end])
    header[46:47] = b"Z"
    record = bytearray(archive[end:])
    count, size = struct.unpack_from("<H2xL", record, 8)[0:2]
    struct.pack_into("<HHL", record, 8, count + 1, count + 1, size + len(header))
    return archive[:end] + bytes(header) + bytes(record)


def bomb(archive: zipfile.ZipFile) -> None:
    archive.writestr(entry("zeros"), bytes(4 << 20), compress_type=zipfile.ZIP_DEFLATED)


def crowd(archive: zipfile.ZipFile) -> None:
    for number in range(60):
        archive.writestr(f"n{number}", b"")


placeholder = named("PLACEHOLDER")

HOSTILE: dict[str, Hostile] = {
    "absolute": Hostile(NAME, named("/etc/cron.d/x")),
    "parent": Hostile(NAME, named("../x")),
    "parent inside": Hostile(NAME, named("a/../../x")),
    "parent at the end": Hostile(NAME, named("a/..")),
    "here": Hostile(NAME, named("./x")),
    "empty component": Hostile(NAME, named("a//x")),
    "only a slash": Hostile(NAME, named("/")),
    "backslash": Hostile(NAME, named("..\\x")),
    "newline": Hostile(NAME, named("a\nb")),
    "escape": Hostile(NAME, named("\x1b[2J")),
    "delete": Hostile(NAME, named("a\x7f")),
    "C1 control": Hostile(NAME, named("a\x9b")),
    "NUL": Hostile(NAME, placeholder, rename_raw(b"ok.py\0.exe")),
    "empty name": Hostile(NAME, named("")),
    "not UTF-8": Hostile(NAME, placeholder, rename_raw(b"\xff\xfe")),
    "UTF-8 in name only": Hostile(NOT_A_ZIP, placeholder, rename_raw(b"\xff\xfe", 0x800)),
    "symlink": Hostile(TYPE, typed(stat.S_IFLNK)),
    "character device": Hostile(TYPE, typed(stat.S_IFCHR)),
    "block device": Hostile(TYPE, typed(stat.S_IFBLK)),
    "FIFO": Hostile(TYPE, typed(stat.S_IFIFO)),
    "socket": Hostile(TYPE, typed(stat.S_IFSOCK)),
    "unknown type": Hostile(TYPE, typed(0o150000)),
    "directory by type only": Hostile(TYPE, typed(stat.S_IFDIR)),
    "directory with content": Hostile(TYPE, typed(stat.S_IFDIR, "dir/")),
    "file by type, directory by name": Hostile(TYPE, typed(stat.S_IFREG, "dir/")),
    "duplicate file": Hostile(TWICE, twice("same", "same")),
    "duplicate directory": Hostile(TWICE, twice("same/", "same/")),
    "file and directory": Hostile(TWICE, twice("same/", "same")),
    "file under a file": Hostile(TWICE, twice("same", "same/x")),
    "file before its parent": Hostile(TWICE, twice("same/x", "same")),
    "path too long": Hostile(LONG, named("/".join(["p" * 99] * 50))),
    "component too long": Hostile(LONG, named("é" * 128)),
    "too deep": Hostile(DEEP, named("d/" * 100 + "x")),
    "too many": Hostile(LARGE, crowd),
    "bomb": Hostile(BOMB, bomb),
    "bzip2": Hostile(METHOD, compressed(zipfile.ZIP_BZIP2)),
    "LZMA": Hostile(METHOD, compressed(zipfile.ZIP_LZMA)),
    "encrypted": Hostile(ENCRYPTED, placeholder, patched(8, "<H", lambda v: v | 1)),
    "strongly encrypted": Hostile(ENCRYPTED, placeholder, patched(8, "<H", lambda v: v | 0x40)),
    "overlap": Hostile(OVERLAP, placeholder, share_bytes),
    "offset before the archive": Hostile(
        f"{OVERLAP}|{DAMAGED}", placeholder, patched(42, "<L", lambda v: v + 9)
    ),
    "more bytes than announced": Hostile(DAMAGED, placeholder, patched(24, "<L", lambda v: v - 1)),
    "fewer bytes than announced": Hostile(DAMAGED, placeholder, patched(24, "<L", lambda v: v + 1)),
    "announces petabytes": Hostile(LARGE, placeholder, patched(24, "<L", lambda v: 2**32 - 2)),
    "wrong checksum": Hostile(DAMAGED, placeholder, patched(16, "<L", lambda v: v ^ 1)),
    "another name inside": Hostile(
        DAMAGED,
        placeholder,
        lambda data: data.replace(b"PLACEHOLDER", b"PLACEHOLDEX", 1),
    ),
    "another name inside that is not UTF-8": Hostile(DAMAGED, placeholder, rename_inside),
    "future version": Hostile(NOT_A_ZIP, placeholder, patched(6, "<H", lambda v: 99)),
    "damaged directory": Hostile(NOT_A_ZIP, placeholder, patched(0, "<L", lambda v: v ^ 1)),
    "directory longer than itself": Hostile(
        NOT_A_ZIP, placeholder, patched(28, "<H", lambda v: v + 7)
    ),
    "cut short": Hostile(NOT_A_ZIP, placeholder, lambda data: data[:-30]),
    "no zip": Hostile(NOT_A_ZIP, None, lambda data: b"#!/bin/sh\n" * 10),
    "tar": Hostile(NOT_A_ZIP, None, lambda data: bytes(10240)),
    "only an end record": Hostile(
        NOT_A_ZIP, None, lambda data: struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 9999, 0, 0)
    ),
}

plain_names = st.text(st.sampled_from("abcdefgh.-_ é漢"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
trees = st.dictionaries(plain_names, st.binary(max_size=200), max_size=6)


def build(files: dict[str, bytes], hostile: Hostile, first: bool) -> bytes:
    """An archive of `files` and the hostile member, either first or last."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        if hostile.add and first and not hostile.patch:
            hostile.add(archive)
        for name, content in files.items():
            archive.writestr(f"fine-{name}", content, zipfile.ZIP_DEFLATED)
        if hostile.add and (hostile.patch or not first):
            hostile.add(archive)
    data = buffer.getvalue()
    return hostile.patch(data) if hostile.patch else data
