"""Text of the cluster must not control the terminal."""

import ast
import io
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kubectl_torchrun
from kubectl_torchrun import output, text
from kubectl_torchrun.cli import defaults
from kubectl_torchrun.terminal import Display

from .laptop import Laptop
from .test_terminal import Screen, terminal_type  # noqa: F401  a fixture

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1;1H\x1b[31mall good\r\x08\u202e"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]")


def commands(shown: str) -> list[str]:
    """The control characters in the text, without our own colours, which EVIL does not have."""
    return COMMANDS.findall(COLOURS.sub("", shown))


def evil_job(laptop: Laptop) -> None:
    failure = {"node": EVIL, "reason": EVIL, "message": f"pod run-r0-0: {EVIL}", "exitCode": 1}
    attempt = {"number": 0, "message": EVIL}
    condition = {"type": "Admitted", "status": "False", "reason": EVIL, "message": EVIL}
    status = {
        "phase": f"Failed{EVIL}", "reason": EVIL, "message": EVIL, "workersStatus": EVIL,
        "lastFailure": failure, "attempts": [attempt], "conditions": [condition],
    }  # fmt: skip
    laptop.job("run", status=status, spec={"jobQueue": EVIL, "numNodes": 1})
    pod = laptop.worker(
        "run",
        0,
        0,
        "2026-01-01T00:00:00.000000000Z \x1b[2J\x9b\x1b]0;owned\x07all good\x08\n",
        terminated={"exitCode": 1, "reason": EVIL},
    )
    assert pod == "run-r0-0"
    quota = {"nodes": EVIL}
    laptop.server.put("torchrunqueues", "q", spec={"quota": quota, "image": EVIL})


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [["list"], ["status", "run", "--no-watch"], ["why", "run"], ["queues"], ["logs", "run"]],
)
def test_no_command_prints_control_characters(laptop: Laptop, words: list[str]) -> None:
    evil_job(laptop)
    result = laptop.run(*words)
    assert result.exit_code in (0, 1), result.output
    assert "all good" in result.stdout
    assert not commands(result.stdout + result.stderr)
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.usefixtures("terminal_type")
def test_a_terminal_gets_only_our_colours() -> None:
    out, err = Screen(), Screen()
    with Display(out, err) as terminal:
        terminal.note(f"Root cause: {EVIL}")
        terminal.transition(f"Failed{EVIL}", EVIL)
        with terminal.bar("Reading", 10):
            terminal.note(EVIL)
    assert "\x1b[31mall" not in err.getvalue()
    assert "\x1b]" not in err.getvalue()
    assert (
        r"\u001b]0;owned\u0007\u001b[2J\u009b1;1H\u001b[31mall good\u000d\u0008" in err.getvalue()
    )


@pytest.mark.usefixtures("terminal_type")
def test_the_spinner_prints_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Screen(), Screen()
    with Display(out, err) as terminal:
        terminal.waiting(EVIL, EVIL, 0)
    assert "owned" in err.getvalue()
    assert "\x1b]" not in err.getvalue()


@pytest.mark.parametrize("sequence", ["[>4;2m", "[?4m", "[=1m", "[<m", "[1 m", "[2J"])
def test_logs_change_no_mode_of_the_terminal(sequence: str) -> None:
    line = f"\x1b{sequence}x\x1b[38:5:1;4mred".encode()
    assert text.log_text(line, colour=True) == "x\x1b[38:5:1;4mred\x1b[0m"
    assert text.log_text(line, colour=False) == "xred"


def test_objects_are_escaped_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, pipe = Screen(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", screen)
    output.put("\x9b")
    assert screen.getvalue() == r"\u009b"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="ascii"))
    output.put("\x9b")
    assert pipe.getvalue() == "\x9b".encode()


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "cp1252", "euc_kr", "utf-8"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_every_character_can_be_printed(encoding: str, errors: str) -> None:
    """Whatever the encoding of the terminal or the pipe is."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, errors) for _ in range(2))
    with Display(out, err) as terminal:
        terminal.log(0, "loss \u2193 \U0001f680".encode())
        terminal.note("done \u2026 \udce9")
    err.flush()
    assert b"loss " in out.buffer.getvalue()  # type: ignore[attr-defined]
    assert b"done " in err.buffer.getvalue()  # type: ignore[attr-defined]


@given(st.text())
def test_escaping_is_safe_and_idempotent(given: str) -> None:
    once = text.escape(given)
    assert not commands(once)
    assert "\x1b" not in once
    assert text.escape(once) == once
    once.encode()
    assert text.escape(str(once)) == once
    coloured = text.style(given, fg="red") + given
    assert isinstance(coloured, text.Styled)
    assert COLOURS.sub("", coloured) == once + once


def test_keys_of_torchrun_toml_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laptop: Laptop
) -> None:
    Path(defaults.FILE).write_text('"\\u001b]0;owned\\u0007" = 1\n')
    result = laptop.run("list")
    assert result.exit_code == 2
    assert "\x1b" not in result.output
    assert r"\u001b]0;owned" in result.output


def test_all_output_goes_through_text_and_terminal() -> None:
    """Other writes to the streams would not escape the text of the cluster."""
    top = Path(kubectl_torchrun.__file__).parent
    prints = {"click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write",
              "sys.stdout.buffer.write", "click.style"}  # fmt: skip
    functions = {
        (path.name, ast.unparse(node.func))
        for path in top.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in prints
    }
    assert {name for name, _ in functions} == {"text.py", "output.py", "completion.py"}
