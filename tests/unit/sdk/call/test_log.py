"""The log of a call in new pods: `logs --follow` of the plugin, which may fail meanwhile."""

import re
from pathlib import Path

import pytest

from torchrun_sdk.call import log as call_log
from torchrun_sdk.call.log import JobLog
from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.errors import WrongRequest

from ..pods import SECONDS
from .test_gang import until

pytestmark = pytest.mark.long  # processes

LOST = "echo Reconnecting >&2; echo Error: Cannot connect to the API server >&2; exit 4"
NOTE = (
    "run: the log has stopped and is requested again; lines may repeat: Cannot connect to the API"
    " server"
)


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(call_log, "_LAST_LINES", float(SECONDS))  # long, for a busy machine


def play(cluster: Path, *scripts: str) -> Path:
    """The plugin runs a script at each start. Returns the file with the arguments of each."""
    starts = cluster / "starts"
    starts.touch()
    cases = "".join(f"{number}) {script};;\n" for number, script in enumerate(scripts, 1))
    program = cluster.parent / "bin" / "kubectl-torchrun"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{starts}\ncase $(wc -l <{starts} | tr -d " ") in\n{cases}esac\n'
    )
    return starts


def follow() -> tuple[JobLog, list[str], list[str]]:
    lines: list[str] = []
    notes: list[str] = []
    return JobLog(Kubectl(), "run", lines.append, notes.append), lines, notes


def test_a_log_that_stops_is_requested_again(cluster: Path) -> None:
    starts = play(cluster, LOST, f"echo one; {LOST}", LOST, "echo two; exit 1")
    log, lines, notes = follow()
    until(lambda: lines == ["one", "two"])
    log.wait()
    log.close()
    assert notes == [NOTE] * 2  # after each line
    words = [line.partition("run --follow")[2] for line in starts.read_text().splitlines()]
    assert words[:2] == ["", ""]
    assert all(re.fullmatch(r" --since=\d+s", each) for each in words[2:])
    assert len(words) == 4


def test_the_last_lines_are_requested_at_once(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_log, "_FIRST_DELAY", 1000.0)
    starts = play(cluster, f"echo one; {LOST}", f"echo two; {LOST}", "echo three")
    log, lines, notes = follow()
    until(lambda: notes)
    log.wait()
    log.close()
    assert lines == ["one", "two"]
    assert len(starts.read_text().splitlines()) == 2


def test_a_wrong_call_is_not_repeated(cluster: Path) -> None:
    starts = play(cluster, "echo Error: No such option >&2; exit 2")
    log, _, notes = follow()
    log.wait()
    log.close()
    assert notes == ["run: there is no log: No such option"]
    assert len(starts.read_text().splitlines()) == 1


def test_a_log_that_is_closed_is_not_requested_again(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_log, "_FIRST_DELAY", 1000.0)
    starts = play(cluster, LOST, LOST)
    log, _, notes = follow()
    until(lambda: notes)
    log.close()
    log._thread.join()
    assert len(starts.read_text().splitlines()) == 1


def test_a_crash_of_the_plugin_is_not_the_end_of_the_job(cluster: Path) -> None:
    """Python exits with the code that stands for a failed job."""
    crash = "python3 -c 'raise OSError(5)'"
    starts = play(cluster, f"{crash}; exit 1", "echo one; exit 1")
    log, lines, notes = follow()
    until(lambda: lines == ["one"])
    log.wait()
    log.close()
    assert notes == [NOTE.replace("Cannot connect to the API server", "OSError: 5")]
    assert len(starts.read_text().splitlines()) == 2


def test_a_plugin_that_is_too_old_is_to_be_updated(cluster: Path) -> None:
    usage = "Error: No such option '--no-defaults'.\\nSee: kubectl torchrun --help"
    play(cluster, *[f'printf "{usage}" >&2; exit 2'] * 2)
    log, _, notes = follow()
    log.wait()
    log.close()
    update = "kubectl-torchrun is older than this package. Install the same version: pipx install"
    (note,) = notes
    assert note.startswith(f"run: there is no log: {update}")
    with pytest.raises(WrongRequest, match=update):
        Kubectl().run_plugin("files", ".")
