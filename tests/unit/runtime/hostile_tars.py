"""Tar archives that must be refused: one class of hostile member each, among valid members."""

import gzip
import io
import random
import tarfile
from collections.abc import Callable

BLOCK = tarfile.BLOCKSIZE
LIMIT_BYTES = 1 << 20
LIMIT_ENTRIES = 50

Add = Callable[[tarfile.TarFile, random.Random], None]
Patch = Callable[[bytes, random.Random], bytes]


def add(archive: tarfile.TarFile, name: str, content: bytes = b"x", **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(content))


def named(*names: str) -> Add:
    return lambda archive, chance: add(archive, chance.choice(names))


def typed(kind: bytes, *targets: str) -> Add:
    def add_member(archive: tarfile.TarFile, chance: random.Random) -> None:
        add(archive, "node", b"", type=kind, linkname=chance.choice(targets or ("",)))

    return add_member


def pair(first: str, second: str) -> Add:
    def add_member(archive: tarfile.TarFile, chance: random.Random) -> None:
        for name in (first, second):
            directory = name.endswith("/")
            kind = tarfile.DIRTYPE if directory else tarfile.REGTYPE
            add(archive, name.rstrip("/"), b"" if directory else b"1", type=kind)

    return add_member


def through_a_link(archive: tarfile.TarFile, chance: random.Random) -> None:
    add(archive, "way", b"", type=tarfile.SYMTYPE, linkname=chance.choice(("/etc", "..", ".")))
    add(archive, "way/passwd", b"root")


def crowd(archive: tarfile.TarFile, chance: random.Random) -> None:
    for number in range(LIMIT_ENTRIES + 1):
        add(archive, f"n{number}", b"")


def bulk(archive: tarfile.TarFile, chance: random.Random) -> None:
    add(archive, "zeros", bytes(LIMIT_BYTES + chance.randrange(1, 1000)))


def deep(archive: tarfile.TarFile, chance: random.Random) -> None:
    add(archive, "d/" * chance.randrange(100, 300) + "x")


def long(archive: tarfile.TarFile, chance: random.Random) -> None:
    add(archive, chance.choice(("p" * 256, "/".join(["p" * 99] * 50), "é" * 128)))


def sparse(archive: tarfile.TarFile, chance: random.Random) -> None:
    add(
        archive,
        "sparse",
        pax_headers={"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,1"},
    )


def global_headers(archive: tarfile.TarFile, chance: random.Random) -> None:
    for part in range(4):
        fields = {f"x{part}-{n}": "v" for n in range(40)}
        raw = tarfile.TarInfo.create_pax_global_header(fields)
        archive.fileobj.write(raw)
        archive.offset += len(raw)
    add(archive, "after")


def header(name: bytes, size: bytes, kind: bytes) -> bytes:
    """A ustar header with a valid checksum and any other fields."""
    block = bytearray(BLOCK)
    block[0 : len(name)] = name
    block[100:108] = b"0000644\0"
    block[124 : 124 + len(size)] = size
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def raw(name: bytes = b"raw", size: bytes = b"00000000001\0", kind: bytes = b"0") -> Patch:
    """A custom header before all others, with one block after it."""
    return lambda data, chance: header(name, size, kind) + b"x" + bytes(BLOCK - 1) + data


def endless(kind: bytes) -> Patch:
    """A header whose payload announces up to eight gibibytes."""
    return lambda data, chance: raw(b"big", b"%011o\0" % chance.randrange(2 << 20, 8 << 30), kind)(
        data, chance
    )


def cut(data: bytes, chance: random.Random) -> bytes:
    # Not within the zeros at the end: an archive is complete without some of them.
    return data[: chance.randrange(1, len(data.rstrip(b"\0")))]


def damaged(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(0, 100)
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def noise(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.randrange(1, 5000))


def packed_badly(data: bytes, chance: random.Random) -> bytes:
    whole = gzip.compress(data)
    at = chance.randrange(20, len(whole))
    return chance.choice((whole[:at], whole[:-8] + bytes(8), b"\x1f\x8b" + chance.randbytes(50)))


CLASSES: dict[str, tuple[Add | None, Patch | None]] = {
    "absolute": (named("/etc/passwd", "//etc/x", "/x"), None),
    "parent": (named("../x", "a/../../x", "a/..", "..", "./../x", "a/./../../b"), None),
    "component": (named("a//x", "a/./x", "././x"), None),
    "backslash": (named("..\\x", "a\\b", "C:\\x"), None),
    "control": (named("a\nb", "\x1b[2J", "a\x7f", "a\x9b", "a\rb", "a\tb"), None),
    "symlink": (typed(tarfile.SYMTYPE, "/etc/passwd", "../x", "fine-0", "node"), None),
    "hard link": (typed(tarfile.LNKTYPE, "/etc/passwd", "../x", "fine-0", "node"), None),
    "through a link": (through_a_link, None),
    "character device": (typed(tarfile.CHRTYPE), None),
    "block device": (typed(tarfile.BLKTYPE), None),
    "FIFO": (typed(tarfile.FIFOTYPE), None),
    "unknown type": (None, raw(kind=b"Z")),
    "sparse": (sparse, None),
    "not UTF-8": (None, raw(name=b"\xff\xfe")),
    "negative size": (None, raw(size=b"\xff" * 12)),
    "size beyond the archive": (None, raw(size=b"77777777777\0")),
    "endless long name": (None, endless(b"L")),
    "endless long link": (None, endless(b"K")),
    "endless PAX header": (None, endless(b"x")),
    "endless global header": (None, endless(b"g")),
    "many global headers": (global_headers, None),
    "twice": (pair("same", "same"), None),
    "file and directory": (pair("same", "same/"), None),
    "file under a file": (pair("same", "same/x"), None),
    "case": (pair("Read", "rEAD"), None),
    "case of a directory": (pair("Dir/x", "dir/y"), None),
    "case beyond ASCII": (pair("STRASSE", "stra\u00dfe"), None),
    "accents": (pair("caf\u00e9", "cafe\u0301"), None),
    "path too long": (long, None),
    "too deep": (deep, None),
    "too many": (crowd, None),
    "bomb": (bulk, None),
    "cut short": (None, cut),
    "damaged header": (None, damaged),
    "noise": (None, noise),
    "bad compression": (None, packed_badly),
}


def build(name: str, chance: random.Random) -> bytes:
    """An archive of this class. Half of them are compressed."""
    extra, patch = CLASSES[name]
    buffer = io.BytesIO()
    layout = tarfile.PAX_FORMAT if extra is sparse or chance.random() < 0.5 else tarfile.GNU_FORMAT
    first = chance.random() < 0.5
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as archive:
        if extra and first:
            extra(archive, chance)
        for number in range(chance.randrange(1, 5)):
            add(archive, f"fine-{number}", chance.randbytes(chance.randrange(0, 2000)))
        if extra and not first:
            extra(archive, chance)
    data = buffer.getvalue()
    if patch:
        data = patch(data, chance)
    return gzip.compress(data, 1) if name != "bad compression" and chance.random() < 0.5 else data
