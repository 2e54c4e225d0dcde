"""Output on terminals and elsewhere."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_torchrun.terminal import Display, phase_style
from kubectl_torchrun.upload.pack import human
from torchrun_api.kinds.status import TERMINAL


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def use_everything(terminal: Display) -> None:
    with terminal:
        terminal.note("Created")
        terminal.waiting("Queued", "for a pod", 0)
        terminal.waiting("Queued", "for a pod", 7)
        terminal.waiting("Queued", "for a pod", 8)
        terminal.transition("Syncing", "WaitingForUpload: m")
        with terminal.bar("Uploading", 1 << 20) as bar:
            terminal.waiting("Queued", "for a pod", 9)
            bar.reached(1 << 19)
            terminal.note("half")
        terminal.log(1, b"\x1b[31mred\x1b[0m")


def test_plain_lines_without_a_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    use_everything(Display(out, err))
    assert out.getvalue() == "[1] red\n"
    assert err.getvalue().splitlines() == [
        "Created",
        "Still waiting: Queued (7 s): for a pod",
        "Syncing   WaitingForUpload: m",
        "half",
    ]


@pytest.mark.parametrize("phase", sorted(TERMINAL))
def test_every_terminal_phase_has_a_colour(phase: str) -> None:
    assert phase_style(phase)["fg"] is not None


def test_a_terminal_has_colours_and_is_reset_at_the_end() -> None:
    out, err = Screen(), Screen()
    use_everything(Display(out, err))
    assert out.getvalue() == "\x1b[35m[1]\x1b[0m \x1b[31mred\x1b[0m\x1b[0m\n"
    assert err.getvalue().rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in err.getvalue()
    assert err.getvalue().count("\x1b[?25l") == err.getvalue().count("\x1b[?25h")


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out, err = Screen(), Screen()
    use_everything(Display(out, err))
    assert out.getvalue() == "[1] red\n"
    assert not re.search(r"\x1b\[[\d;]*3\dm", err.getvalue())


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out, err = Screen(), Screen()
    use_everything(Display(out, err))
    assert "\x1b" not in out.getvalue() + err.getvalue()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b" 10%|#\r 20%|##\r", "[0]  20%|##"),
        (b"a\tb", "[0] a\tb"),
        (b"\xff", "[0] \ufffd"),
        (b"\x1b]0;title\x07x", "[0] x"),
        (b"\x1b[2Jx\x1b[Hy", "[0] xy"),
        (b"", "[0] "),
    ],
)
def test_log_lines(line: bytes, shown: str) -> None:
    out = io.StringIO()
    Display(out, io.StringIO()).log(0, line)
    assert out.getvalue() == shown + "\n"


@given(st.binary())
def test_a_log_line_is_one_line_without_control_characters(line: bytes) -> None:
    out = io.StringIO()
    Display(out, io.StringIO()).log(0, line.replace(b"\n", b""))
    text = out.getvalue()
    assert text.endswith("\n")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text[:-1])


@given(st.binary())
def test_a_log_line_on_a_terminal_can_only_change_colours(line: bytes) -> None:
    out = Screen()
    Display(out, Screen()).log(0, line.replace(b"\n", b""))
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[0-?]*[ -/]*m", "", out.getvalue()[:-1])
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 42, "4.0 TiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert human(size) == text
