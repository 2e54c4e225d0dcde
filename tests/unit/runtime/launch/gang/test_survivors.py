"""A process that the kernel blocks survives the command of its round."""

import os
import signal
from dataclasses import replace

from unit.runtime.launch.gang.test_gang import GangFactory, await_line, make_gang
from unit.runtime.launching import FOLDER

__all__ = ["make_gang"]

# A launcher that does not kill what a command leaves, as if the kernel blocked it.
WITHOUT_KILLS = """
import sys
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch import supervise
from torchrun_runtime.launch.app import main
supervise._CLEAR_SECONDS = 0.0
sys.exit(main())
"""


def test_no_round_follows_while_a_process_of_the_last_one_runs(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    folder = gang.launchers[1].directory / "launcher"
    folder.mkdir()
    (folder / "__main__.py").write_text(WITHOUT_KILLS.format(runtime=str(FOLDER.parents[1])))
    gang.launchers[1] = replace(gang.launchers[1], folder=folder)
    leaves = '[ "$NODE_RANK" = 1 ] || exec sleep 1000; sleep 1000 & echo $!; exit 3'
    running = gang.start(leaves)
    survivor = int(running[1].line())
    await_line(running[1], "processes of the command cannot be killed: this pod ends")
    os.kill(survivor, signal.SIGKILL)  # it has the pipes of the launcher
    result = running[1].end()
    assert (result.exit_code, result.message["reason"]) == (3, "ExitCode")
    running[0].stop()
    assert "round 1" not in running[0].end().err
