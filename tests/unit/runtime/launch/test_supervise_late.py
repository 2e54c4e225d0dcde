"""Ranks and their agent after a stop, when the grace period is over."""

import pytest

from unit.runtime.launching import Launcher, script

AGENT = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: print("the agent has got SIGTERM", flush=True))
subprocess.Popen(["sh", "-c", sys.argv[1]], env={**os.environ, "LOCAL_RANK": "0"})
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("rank", "lines"),
    [
        ("trap '' TERM; echo ready; exec sleep 1000", []),
        ("echo ready; exec sleep 1000", ["the agent has got SIGTERM"]),
    ],
    ids=["rank", "agent"],
)
def test_what_does_not_end_in_the_grace_period_is_killed(
    launcher: Launcher, rank: str, lines: list[str]
) -> None:
    agent = [launcher.python, script(launcher.directory, AGENT), rank]
    launched = launcher.start(agent, TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="1")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == lines
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")
