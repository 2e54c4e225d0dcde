"""The screen on which recordings of a terminal are played."""

import pytest
from screen import Event, Line, Screen, Span

RED = frozenset({"red"})
PLAIN: frozenset[str] = frozenset()


def play(*events: tuple[float, str, str], columns: int = 20) -> list[Line]:
    return Screen.play(columns, [Event(*event) for event in events])


def texts(*output: str, columns: int = 20) -> list[str]:
    return [line.text() for line in play(*((0.0, "o", part) for part in output), columns=columns)]


def test_lines_are_as_a_terminal_shows_them():
    assert texts("one\r\ntwo\r\n\r\n") == ["one", "two"]
    assert texts("0 %\r50 %\r100 %\r\n") == ["100 %"]
    assert texts("abcdef", "gh\r\n", columns=4) == ["abcd", "efgh"]


def test_a_spinner_leaves_nothing():
    frame = "\x1b[?25l\r\x1b[2K* Queued"
    assert texts(frame, "\r\x1b[2K- Queued", "\r\x1b[2K\x1b[?25h", "Running\r\n") == ["Running"]
    assert texts("a\r\nb\r\n", "\x1b[1A\x1b[2K", "c") == ["a", "c"]
    assert texts("abc\r\x1b[K") == []


def test_text_has_its_style():
    (line,) = play((0.0, "o", "  \x1b[1;31mno\x1b[0m way\x1b[92m!\x1b[39m"))
    assert list(line.spans()) == [
        Span(2, "no", RED | {"bold"}),
        Span(5, "way", PLAIN),
        Span(8, "!", frozenset({"green"})),
    ]


def test_an_indexed_colour_is_kept_by_its_number():
    (line,) = play((0.0, "o", "\x1b[38;5;70ma\x1b[0mb"))
    assert list(line.spans()) == [Span(0, "a", frozenset({"colour-70"})), Span(1, "b", PLAIN)]


def test_a_line_has_the_time_of_its_last_change():
    lines = play((1.0, "o", "a\r\n"), (2.0, "o", "*"), (3.5, "o", "\r\x1b[2Kb\r\n"), (4.0, "o", ""))
    assert [(line.text(), line.seconds) for line in lines] == [("a", 1.0), ("b", 3.5)]


def test_a_marker_belongs_to_the_line_after_it():
    lines = play((0.0, "o", "\r\n"), (1.0, "m", "ls"), (1.0, "o", "$ ls\r\na\r\n"))
    assert [line.marker for line in lines] == ["", "ls", ""]


@pytest.mark.parametrize("output", ["\x1b[5;1H", "\x1b[48;5;1m", "\x1bM"])
def test_what_it_cannot_show_is_an_error(output):
    with pytest.raises(ValueError, match="unknown"):
        play((0.0, "o", output))
