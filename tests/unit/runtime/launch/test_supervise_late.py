"""Ranks and their agent after a stop, when the grace period is over."""

import pytest

from unit.runtime.launching import Launcher, script

AGENT = """
import os, signal, subprocess, sys
RANK = "import signal; print('ready', flush=True); signal.pause()"
signal.signal(signal.SIGTERM, lambda *_: print("the agent has got SIGTERM", flush=True))
command = [sys.argv[1] + ' exec "$@"', "sh", sys.executable, "-c", RANK]
subprocess.Popen(["sh", "-c", *command], env={**os.environ, "LOCAL_RANK": "0"})
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("handling", "lines"),
    [
        ("trap '' TERM;", []),
        ("", ["the agent has got SIGTERM"]),
    ],
    ids=["rank", "agent"],
)
def test_what_does_not_end_in_the_grace_period_is_killed(
    launcher: Launcher, handling: str, lines: list[str]
) -> None:
    agent = [launcher.python, script(launcher.directory, AGENT), handling]
    launched = launcher.start(agent, TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="1")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == lines
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")
