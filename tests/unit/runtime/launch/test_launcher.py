"""The end of a launcher by the thread that watches the fence: its main thread may be blocked."""

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from torchrun_runtime.launch import launcher
from torchrun_runtime.launch.output import TerminationLog
from torchrun_runtime.launch.processes import Process
from torchrun_runtime.launch.supervise import StopRequest
from unit.runtime.virtual_time import Clock

RANK = Process(pid=2, parent=1, name="python", started=0)


class Ranks:
    """A node with one rank, which ends after this number of signals."""

    def __init__(self, signals: float) -> None:
        self._signals = signals

    def descendants(self, root: int) -> list[Process]:
        assert root == os.getpid()
        return [RANK] if self._signals > 0 else []

    def send(self, processes: list[Process], number: int) -> None:
        assert (processes, number) == ([RANK], 9)
        self._signals -= 1


@pytest.mark.parametrize(
    ("signals", "seconds"),
    [(0, 0.0), (1, 0.05), (3, 0.15), (float("inf"), launcher._KILL_SECONDS)],
    ids=["no rank", "first signal", "third signal", "never"],
)
def test_the_launcher_waits_until_its_ranks_are_dead_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: float, seconds: float
) -> None:
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    clock, ranks = Clock(), Ranks(signals)
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(launcher, "descendants", ranks.descendants)
    monkeypatch.setattr(launcher, "send", ranks.send)
    monkeypatch.setattr(launcher.os, "_exit", leave)
    log = tmp_path / "termination-log"
    log.touch()
    with pytest.raises(SystemExit) as end:
        launcher._end_now(
            TerminationLog(str(log)), StopRequest(128, "Fenced", "A newer attempt has started.")
        )
    assert end.value.code == 128
    message = json.loads(log.read_text())
    assert (message["reason"], message["message"]) == ("Fenced", "A newer attempt has started.")
    assert clock.now == pytest.approx(seconds, abs=0.001)
