"""The output of a rank, which the program in the pod sends line by line, and its other frames."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from torchrun_sdk.serialization import pack
from torchrun_sdk.spec import (
    CALLS,
    RESULTS,
    Here,
    Lines,
    Message,
    Removed,
    Result,
    Started,
    decode,
    encode,
)
from torchrun_sdk.text import log_line
from torchrun_sdk.worker import collect
from torchrun_sdk.worker.call_files import RankFiles
from torchrun_sdk.worker.collect import _Client, _Tail

STATE = b"\r 12%|####  | 120/1000 [00:10<01:10, 12it/s]"


@pytest.fixture
def tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[_Tail, Callable[[bytes], None]]]:
    monkeypatch.setattr(collect, "_PIECE", 1000)
    path = tmp_path / "0.log"
    path.touch()

    def write(data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    with closing(_Tail(path)) as tail:
        yield tail, write


def shown(tail: _Tail) -> list[str]:
    found: list[str] = []
    while lines := tail.read():
        assert lines.first == tail._lines - len(lines.lines)
        found += map(log_line, lines.lines)
    return found


@pytest.mark.parametrize("part", [7, 450, 999, 1000, 1001, 10_000])
def test_lines_after_a_long_progress_bar_are_shown(
    tail: tuple[_Tail, Callable[[bytes], None]], part: int
) -> None:
    """However the output was divided into writes, the numbers of the lines are the same."""
    output = b"first\n" + STATE * 100 + b"\r100%\n\nlast\n"
    found: list[str] = []
    for at in range(0, len(output), part):
        tail[1](output[at : at + part])
        found += shown(tail[0])
    assert found == ["first", "100%", "", "last"]


@pytest.mark.parametrize("part", [7, 450, 999, 1000, 1001, 10_000])
def test_a_line_that_is_too_long_is_left_out(
    tail: tuple[_Tail, Callable[[bytes], None]], part: int
) -> None:
    output = b"first\n" + b"x" * 5000 + b"\n" + b"y" * 999 + b"\nlast\n"
    found: list[str] = []
    for at in range(0, len(output), part):
        tail[1](output[at : at + part])
        found += shown(tail[0])
    assert found == ["first", "[a line of more than 1000 bytes is not shown]", "y" * 999, "last"]


def test_a_slow_client_gets_all_of_its_call_while_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another client has read the call, so that the next one removes its files."""
    (tmp_path / CALLS).mkdir()
    (tmp_path / CALLS / "1-a.json").touch()
    first, later = (RankFiles(tmp_path / RESULTS / "a", rank) for rank in (0, 1))
    for rank in (first, later):
        rank.log.write_bytes(b"line\n" * 3)
        rank.write_start(encode(Started(rank.rank, 2, "n", 2, 1.0, 1.0)))
        rank.write_outcome(encode(Result(rank.rank, "n", pack("of a", "json", "x"))))
    client = _Client(tmp_path, "")
    read = _Tail.read

    def slow(tail: _Tail) -> Lines | None:
        lines = read(tail)
        for rank in (first, later):
            rank.mark_read()
            RankFiles(tmp_path / RESULTS / "b", rank.rank).remove_read()
        return lines

    monkeypatch.setattr(collect, "_PIECE", 10)
    monkeypatch.setattr(_Tail, "read", slow)
    client._send_new()
    sent: list[Message | None] = [decode(line) for line in capsys.readouterr().out.splitlines()]
    for rank in (0, 1):
        lines = [each.lines for each in sent if isinstance(each, Lines) and each.rank == rank]
        assert lines == [["line", "line"], ["line"]]
    assert [each.rank for each in sent if isinstance(each, Started)] == [0, 1]
    assert [each.rank for each in sent if isinstance(each, Result)] == [0, 1]
    client._send_new()
    assert not capsys.readouterr().out
    client.close()


def test_a_file_that_is_removed_after_it_is_found_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / CALLS).mkdir()
    (tmp_path / CALLS / "1-a.json").touch()
    rank = RankFiles(tmp_path / RESULTS / "a", 0)
    rank.log.write_bytes(b"line\n")
    rank.write_outcome("{}")
    rank.mark_read()
    client = _Client(tmp_path, "")
    glob = Path.glob

    def remove_after_glob(folder: Path, pattern: str) -> list[Path]:
        paths = list(glob(folder, pattern))
        if folder.name == "a":
            RankFiles(tmp_path / RESULTS / "b", 0).remove_read()
        return paths

    monkeypatch.setattr(Path, "glob", remove_after_glob)
    client._send_new()
    assert not capsys.readouterr().out


def test_a_client_learns_that_another_one_has_read_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It connects again after the next call has begun."""
    (tmp_path / CALLS).mkdir()
    rank = RankFiles(tmp_path / RESULTS / "a", 0)
    rank.write_start(encode(Started(0, 1, "n", 1, 1.0, 1.0)))
    rank.write_outcome(encode(Result(0, "n", pack("of a", "json", "x"))))
    rank.mark_read()
    stays = _Client(tmp_path, "a")
    stays._send_new()
    assert isinstance(decode(capsys.readouterr().out.splitlines()[-1]), Result)
    (tmp_path / CALLS / "1-b.json").touch()
    RankFiles(tmp_path / RESULTS / "b", 0).remove_read()
    again = _Client(tmp_path, "a")
    for _ in range(2):
        stays._send_new()
        again._send_new()
    sent = [decode(line) for line in capsys.readouterr().out.splitlines()]
    assert sent == [Started(0, 1, "n", 1, 1.0, 1.0), Removed(0)]


def test_a_line_may_arrive_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client(tmp_path, "a")
    requests: list[object] = []
    monkeypatch.setattr(client, "_do", requests.append)
    reader, writer = os.pipe()
    with open(reader) as stdin, open(writer, "wb", buffering=0) as client_end:
        monkeypatch.setattr(sys, "stdin", stdin)
        for piece in (b'{"a": ', b"1", b'}\n{"b": 2}\n{"c"', b": 3}\n"):
            client_end.write(piece)
            assert client._receive()
        client_end.close()
        assert not client._receive()
    assert requests == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_a_client_of_the_newest_call_learns_which_one_it_is(tmp_path: Path) -> None:
    (tmp_path / CALLS).mkdir()
    (tmp_path / CALLS / "1-a.json").touch()
    RankFiles(tmp_path / RESULTS / "a", 0).write_start("{}")
    assert _Client(tmp_path, "")._here() == Here(True, "free", 1, "a")
