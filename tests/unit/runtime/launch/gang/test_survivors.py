"""A process that the kernel blocks survives the command of its round."""

import os
import signal
import time
from dataclasses import replace

import pytest

from torchrun_runtime.launch.processes import state
from unit.runtime.launch.gang.test_gang import Gang, GangFactory, await_line, make_gang
from unit.runtime.launching import FOLDER, SECONDS, Result

pytestmark = pytest.mark.long  # processes

__all__ = ["make_gang"]

# A launcher that does not kill what a command leaves, as if the kernel blocked it.
WITHOUT_KILLS = """
import sys
sys.path.insert(0, {runtime!r})
from torchrun_runtime.launch import supervise
from torchrun_runtime.launch.launcher import main
supervise._CLEAR_SECONDS = 0.0
sys.exit(main())
"""


def block_kills(gang: Gang, node: int) -> None:
    folder = gang.launchers[node].directory / "launcher"
    folder.mkdir()
    (folder / "__main__.py").write_text(WITHOUT_KILLS.format(runtime=str(FOLDER.parents[1])))
    gang.launchers[node] = replace(gang.launchers[node], folder=folder)


def test_no_round_follows_while_a_process_of_the_last_one_runs(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    block_kills(gang, 1)
    leaves = '[ "$NODE_RANK" = 1 ] || exec sleep 1000; sleep 1000 & echo $!; exit 3'
    running = gang.start(leaves)
    survivor = int(running[1].line())
    await_line(running[1], "processes of the command cannot be killed: this pod ends")
    os.kill(survivor, signal.SIGKILL)  # it has the pipes of the launcher
    result = running[1].end()
    assert (result.exit_code, result.message["reason"]) == (3, "ExitCode")
    running[0].stop()
    assert "round 1" not in running[0].end().err


# Node 1 succeeds, and leaves a process in the first round. Node 0 fails in that round.
SUCCEEDS_BEFORE_A_FAILURE = """
if [ "$NODE_RANK$TORCHRUN_ROUND" = 10 ]; then
  sleep 1000 > /dev/null 2>&1 &
  echo $! $$
elif [ "$TORCHRUN_ROUND" = 0 ]; then
  while [ ! -e "$SHARED/fail" ]; do sleep 0.05; done
  exit 3
fi
"""


def await_state(pid: int, *states: str) -> None:
    deadline = time.monotonic() + SECONDS
    while state(pid)[0] not in states:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_round_after_a_success(gang: Gang, *, survives: bool) -> tuple[Result, Result, int]:
    """How both nodes end, and the process that node 1 has left."""
    gang.annotate(start="1")
    block_kills(gang, 1)
    running = gang.start(SUCCEEDS_BEFORE_A_FAILURE)
    survivor, shell = map(int, running[1].line().split())
    await_state(shell, "g")  # gone: the launcher has reaped it
    if not survives:
        os.kill(survivor, signal.SIGKILL)
        await_state(survivor, "Z", "g")
    (gang.launchers[0].directory / "fail").touch()
    return running[0].end(), running[1].end(), survivor


def test_no_round_follows_beside_a_process_on_a_node_that_has_succeeded(
    make_gang: GangFactory,
) -> None:
    _, second, survivor = start_round_after_a_success(make_gang(2), survives=True)
    os.kill(survivor, signal.SIGKILL)
    assert "starting round 1" not in second.err
    assert "processes of the command cannot be killed: this pod ends" in second.err
    assert (second.exit_code, second.message["reason"]) == (143, "Stopped")
    assert "cannot be killed" in str(second.message["message"])
    assert second.message["restartsInPlace"] == 1


def test_a_round_follows_once_that_process_has_ended(make_gang: GangFactory) -> None:
    first, second, _ = start_round_after_a_success(make_gang(2), survives=False)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "starting round 1" in second.err
