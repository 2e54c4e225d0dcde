"""How much of the output a copy keeps: in a line, in memory, and in a file."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchrun_runtime.launch import streams
from torchrun_runtime.launch.streams import Copy
from unit.runtime.launch.gang.test_waits import Observed
from unit.runtime.launch.test_streams import hanging_copy, plain, read_to_end

KIB, MIB = 1 << 10, 1 << 20


def copied(directory: Path, *pieces: bytes) -> list[bytes]:
    copy = Copy(str(directory), "0", "1")
    for piece in pieces:
        copy.add(1, piece)
    copy.close(120)
    return plain((directory / "logs/0/node-1.log").read_bytes()).splitlines()


def test_a_line_is_cut_after_64_kib(tmp_path: Path) -> None:
    longest = b"x" * 64 * KIB
    assert copied(tmp_path / "a", longest, b"\nz\n") == [longest, b"z"]
    assert copied(tmp_path / "b", longest, b"y", b"z\n") == [longest + b"y", b"z"]


def test_a_file_has_32_mib_before_the_next_one_begins(tmp_path: Path) -> None:
    (tmp_path / "logs/0").mkdir(parents=True)
    file = tmp_path / "logs/0/node-1.log"
    file.touch()
    os.truncate(file, 32 * MIB - 10)
    copy = Copy(str(tmp_path), "0", "1")
    copy.add(1, b"the last line\n")
    copy.close(120)
    assert file.with_suffix(".log.1").stat().st_size == 32 * MIB
    assert file.read_bytes().endswith(b"the last line\n")


def test_eight_mib_wait_for_storage_that_does_not_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy, file = hanging_copy(tmp_path)
    for _ in range(8):
        copy.add(1, b"x" * (MIB - 1) + b"\n")
    assert capfd.readouterr().err == ""
    copy.add(1, b"too much\n")
    assert "is too slow: the copy omits parts of this log" in capfd.readouterr().err
    lines = read_to_end(copy, file).splitlines()
    assert len(lines) == 9
    assert lines[-1] == b"torchrun-launch: 9 bytes are missing here"


def test_other_users_can_read_a_copy_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert copied(tmp_path, b"hello\n") == [b"hello"]
    finally:
        os.umask(before)
    paths = [tmp_path / path for path in ("logs", "logs/0", "logs/0/node-1.log")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o755, 0o755, 0o644]


def test_output_and_the_end_wake_a_copy_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition = Observed()
    monkeypatch.setattr(streams, "threading", SimpleNamespace(Condition=lambda: condition))
    copy = Copy(str(tmp_path), "0", "1")
    assert condition.has_begun.wait(60)
    condition.has_begun.clear()
    copy.add(1, b"a line\n")
    assert condition.has_begun.wait(60)
    assert plain((tmp_path / "logs/0/node-1.log").read_bytes()) == b"a line\n"
    copy.close(60)
    assert not copy._thread.is_alive()


def test_nothing_waits_after_the_end(tmp_path: Path) -> None:
    copy = Copy(str(tmp_path), "0", "1")
    copy.add(1, b"the last line\n")
    copy.close(120)
    assert copy._size == 0
