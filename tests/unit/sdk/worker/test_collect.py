"""The output of a rank, which the program in the pod sends line by line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchrun_sdk.text import log_line
from torchrun_sdk.worker import collect
from torchrun_sdk.worker.collect import _Tail

STATE = b"\r 12%|####  | 120/1000 [00:10<01:10, 12it/s]"


@pytest.fixture
def tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[_Tail, Callable[[bytes], None]]:
    monkeypatch.setattr(collect, "_PIECE", 1000)
    path = tmp_path / "0.log"
    path.touch()

    def write(data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    return _Tail(path), write


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
