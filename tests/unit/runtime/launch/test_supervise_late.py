"""Ranks and their agent after a stop, when the grace period is over."""

import pytest

from unit.runtime.launching import Launcher, changed, script

pytestmark = pytest.mark.long  # processes

AGENT = """
import os, signal, subprocess, sys
RANK = "import signal; print('ready', flush=True); signal.pause()"
def print_signal(*_):
    print("the agent has got SIGTERM", flush=True)
    open("late", "w").close()
signal.signal(signal.SIGTERM, print_signal)
command = [sys.argv[1] + ' exec "$@"', "sh", sys.executable, "-c", RANK]
subprocess.Popen(["sh", "-c", *command], env={**os.environ, "LOCAL_RANK": "0"})
while True:
    signal.pause()
"""
# The grace period is also over when this file exists. Nothing else ends the agent.
LATE = {
    "graceful.py": {
        "time.monotonic() >= self._deadline": (
            "(time.monotonic() >= self._deadline or os.path.exists('late'))"
        ),
        "_AGENT_SECONDS = 10.0": "_AGENT_SECONDS = 1000.0",
    }
}


@pytest.mark.parametrize(
    ("handling", "grace", "lines"),
    [
        ("trap '' TERM;", "1", []),
        ("", "1000", ["the agent has got SIGTERM"]),
    ],
    ids=["rank", "agent"],
)
def test_what_does_not_end_in_the_grace_period_is_killed(
    launcher: Launcher, handling: str, grace: str, lines: list[str]
) -> None:
    agent = [launcher.python, script(launcher.directory, AGENT), handling]
    late = changed(launcher, LATE)
    launched = late.start(agent, TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS=grace)
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == lines
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")
