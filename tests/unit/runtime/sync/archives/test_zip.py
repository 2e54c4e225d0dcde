"""Archives: which are extracted, and which are refused before a file is written."""

import hashlib
import io
import os
import re
import stat
import struct
import tempfile
import tracemalloc
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import examples
from torchrun_api.contract.contents import Manifest
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.settings import ArchiveLimits
from unit.runtime import hostile

LIMITS = ArchiveLimits(entries=50, bytes=1 << 30, ratio=200, ratio_floor=1 << 20)


def zipped(members: dict[str, bytes], mode: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(hostile.entry(name, mode=mode), content)
    return buffer.getvalue()


def extracted(
    data: bytes, directory: Path, limits: ArchiveLimits = LIMITS
) -> tuple[Manifest, Path]:
    archive = directory / "archive.zip"
    archive.write_bytes(data)
    tree = directory / "tree"
    return extract(archive, tree, limits), tree


@given(
    tree=st.dictionaries(
        st.lists(hostile.plain_names, min_size=1, max_size=4).map(tuple),
        st.binary(max_size=5000),
        max_size=12,
    )
)
@examples(60)
def test_extracts_every_tree_as_it_was(tree: dict[tuple[str, ...], bytes]) -> None:
    files = {path: data for path, data in tree.items() if not _is_parent(path, tree)}
    with tempfile.TemporaryDirectory() as directory:
        data = zipped({"/".join(path): content for path, content in files.items()})
        result, root = extracted(data, Path(directory))
        extracted_files = {
            path.relative_to(root).parts: path.read_bytes()
            for path in root.rglob("*")
            if path.is_file()
        }
    assert extracted_files == files
    assert (result.files, result.size) == (len(files), sum(map(len, files.values())))
    digests = {entry.path: entry.sha256 for entry in result.entries if entry.mode != "dir"}
    assert digests == {
        "/".join(path): hashlib.sha256(data).hexdigest() for path, data in files.items()
    }


def _is_parent(path: tuple[str, ...], tree: dict[tuple[str, ...], bytes]) -> bool:
    return any(other[: len(path)] == path for other in tree if other != path)


@pytest.mark.parametrize("kind", hostile.HOSTILE)
@given(files=hostile.trees, first=st.booleans())
@examples(8)
def test_refuses_hostile_archives(kind: str, files: dict[str, bytes], first: bool) -> None:
    case = hostile.HOSTILE[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of the duplicates that it writes
        data = hostile.build(files, case, first)
    with tempfile.TemporaryDirectory() as directory:
        with pytest.raises(ArchiveError) as refusal:
            extracted(data, Path(directory))
        assert re.search(case.words, refusal.value.message), refusal.value.message
        assert refusal.value.message.isprintable()
        assert {path.name for path in Path(directory).iterdir()} <= {"archive.zip", "tree"}


@given(data=st.binary(max_size=400), tail=st.booleans())
@examples(200)
def test_any_bytes_are_extracted_or_refused_but_never_a_crash(data: bytes, tail: bool) -> None:
    noise = zipped({"a/b": b"text" * 30}) + data if tail else data
    with tempfile.TemporaryDirectory() as directory, suppress(ArchiveError):
        extracted(noise, Path(directory))


@given(st.data())
@examples(300)
def test_any_flipped_byte_is_extracted_or_refused(data: st.DataObject) -> None:
    archive = bytearray(zipped({"a/b": b"text" * 30, "c": os.urandom(20)}))
    at = data.draw(st.integers(0, len(archive) - 1))
    archive[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as directory:
        with suppress(ArchiveError):
            extracted(bytes(archive), Path(directory))
        escaped = [
            path for path in Path(directory).iterdir() if path.name not in ("archive.zip", "tree")
        ]
        assert not escaped


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(0, 0o644), (0o100600, 0o644), (0o100700, 0o755), (0o106777, 0o755), (0o100000, 0o644)],
)
def test_keeps_the_executable_bit_and_nothing_else(
    tmp_path: Path, mode: int, expected: int
) -> None:
    old = os.umask(0o077)
    try:
        _, tree = extracted(zipped({"run.sh": b"#!"}, mode), tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tree / "run.sh").stat().st_mode) == expected


def test_says_what_to_do_about_a_link(tmp_path: Path) -> None:
    data = hostile.build({}, hostile.HOSTILE["symlink"], first=True)
    with pytest.raises(ArchiveError, match=r"'node' is a symbolic link\. Archive the file"):
        extracted(data, tmp_path)


def test_keeps_empty_directories(tmp_path: Path) -> None:
    _, tree = extracted(zipped({"logs/": b"", "a/b/": b"", "a/": b""}), tmp_path)
    assert (tree / "logs").is_dir()
    assert (tree / "a/b").is_dir()


def test_accepts_an_empty_archive(tmp_path: Path) -> None:
    result, tree = extracted(zipped({}), tmp_path)
    assert all(entry.mode == "dir" for entry in result.entries)
    assert tree.is_dir()


def test_reads_unflagged_utf8_names(tmp_path: Path) -> None:
    data = zipped({"PLACEHOLDER": b"1"})
    raw = "näme.py".encode().ljust(11, b"_")
    _, tree = extracted(hostile.rename_raw(raw)(data), tmp_path)
    assert [path.name for path in tree.iterdir()] == ["näme.py___"]


def test_accepts_zip64_and_a_prefix(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w") as archive,
        archive.open("big", "w", force_zip64=True) as file,
    ):
        file.write(b"data")
    result, _ = extracted(b"#!/usr/bin/env python3\n" + buffer.getvalue(), tmp_path)
    assert result.files == 1


def test_counts_members_before_zipfile_holds_them_in_memory(tmp_path: Path) -> None:
    header = struct.pack("<4s24xHHH12x", hostile.CENTRAL, 1, 0, 0) + b"n"
    many = 300_000
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1)
    size = len(header) * many
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, size, 0)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 2**32 - 1, 2**32 - 1, 0)
    archive = tmp_path / "archive.zip"
    archive.write_bytes(header * many + end64 + locator + end)
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveError, match="more than 200000 entries"):
            extract(archive, tmp_path / "tree", ArchiveLimits())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_refuses_what_does_not_fit_before_writing(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    many = free // 2**32 + 2
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(many):
            archive.writestr(f"file-{number}", b"x")
    lying = bytearray(buffer.getvalue())
    at = -1
    while (at := lying.find(hostile.CENTRAL, at + 1)) >= 0:
        struct.pack_into("<L", lying, at + 24, 2**32 - 2)
    with pytest.raises(SyncError) as failure:
        extracted(bytes(lying), tmp_path, ArchiveLimits(bytes=2**60, ratio=2**40))
    assert failure.value.reason == "WorkspaceFull"
    assert failure.value.message.endswith(" free. Increase volumes.workspace.size in a new job.")
    assert not failure.value.permanent
    assert not (tmp_path / "tree").exists()


def disagreeing(entries: int) -> bytes:
    """An archive whose zip64 record is where its locator points, not right before the locator.

    Its other end record announces no members.
    """
    data = zipped({f"f{number}": b"" for number in range(entries)})
    body, (size, start) = data[:-22], struct.unpack("<LL", data[-10:-2])
    at, extra = len(body), b"E" * 64
    numbers = (44 + len(extra), 45, 45, 0, 0, entries, entries, size, start)
    record = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", *numbers) + extra
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    return body + record + locator + struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 0, 0, 0, at, 0)


def test_refuses_an_ambiguous_zip64_record(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="zip64 record") as caught:
        extracted(disagreeing(50), tmp_path, ArchiveLimits(entries=10))
    assert caught.value.reason == "InvalidArchive"


def test_refuses_a_long_list_of_few_members(tmp_path: Path) -> None:
    """zipfile reads the whole list into memory: names, extra fields and comments."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(1100):
            member = zipfile.ZipInfo(str(number))
            member.comment = b"c" * 65535
            member.extra = struct.pack("<HH", 0x9999, 65000) + b"e" * 65000
            archive.writestr(member, b"")
    data = packed.getvalue()
    del packed, archive
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveError, match="The list of files in the archive has") as caught:
            extracted(data, tmp_path, ArchiveLimits())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "WorkspaceTooLarge"


def test_refuses_more_members_than_were_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to the members that zipfile extracts, even if the count missed some."""
    monkeypatch.setattr("torchrun_runtime.sync.archives.zip.count_entries", lambda file, most: 1)
    with pytest.raises(ArchiveError, match="two central directories") as caught:
        extracted(zipped({"a": b"", "b": b""}), tmp_path)
    assert caught.value.reason == "InvalidArchive"
    assert not (tmp_path / "tree").exists()
