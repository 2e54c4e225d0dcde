"""Why a node's command ended by order of the leader: its own failure, or that of another node."""

import json
from pathlib import Path

import pytest

from torchrun_runtime.launch.command_end import cause_of_round
from torchrun_runtime.launch.failure import Cause
from torchrun_runtime.launch.gang.messages import StopRound

STOPPED_AT = 1000.0


def report(folder: Path, time: float, message: str = "KeyError: 'x'") -> None:
    body = {"pid": 7, "time": time, "rank": "3", "type": "KeyError", "message": message}
    (folder / "7.json").write_text(json.dumps({**body, "failures": []}))


def cause(folder: Path, *, failed: bool = True, out_of_memory: bool = False) -> Cause:
    return cause_of_round(StopRound(0, failed=failed), STOPPED_AT, str(folder), out_of_memory)


def test_a_rank_that_had_failed_shortly_before_is_the_cause(tmp_path: Path) -> None:
    report(tmp_path, STOPPED_AT - 30)
    found = cause(tmp_path)
    assert (found.reason, found.rank, found.message) == ("Exception", 3, "KeyError: 'x'")


@pytest.mark.parametrize("time", [STOPPED_AT - 3600, STOPPED_AT + 1])
def test_an_old_exception_and_one_of_the_stop_itself_are_not(tmp_path: Path, time: float) -> None:
    report(tmp_path, time)
    assert cause(tmp_path).reason == "PeerFailed"


def test_a_rank_that_lost_a_peer_is_not(tmp_path: Path) -> None:
    report(tmp_path, STOPPED_AT - 1, "RuntimeError: Connection closed by peer")
    assert cause(tmp_path).reason == "PeerFailed"


def test_a_rank_that_the_kernel_killed_is_the_cause(tmp_path: Path) -> None:
    found = cause(tmp_path, out_of_memory=True)
    assert (found.exit_code, found.signal, found.reason) == (137, 9, "OOMKilled")


def test_newer_code_ends_ranks_without_a_failure(tmp_path: Path) -> None:
    report(tmp_path, STOPPED_AT - 1)
    found = cause(tmp_path, failed=False, out_of_memory=True)
    assert (found.exit_code, found.reason) == (143, "Stopped")
