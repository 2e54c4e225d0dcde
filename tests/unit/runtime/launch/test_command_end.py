"""Why a node's command ended by order of the leader: its own failure, or that of another node."""

import json
from pathlib import Path

import pytest

from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.command_end import (
    UNNOTICED_SECONDS,
    cause_of_agreement,
    cause_of_round,
)
from torchrun_runtime.launch.failure import Report
from torchrun_runtime.launch.gang.messages import StopRound
from torchrun_runtime.launch.processes import Running
from torchrun_runtime.launch.stopping import Stopped

STOPPED_AT = 1000.0
NOTHING = Running()


def report(
    folder: Path,
    time: float,
    message: str = "KeyError: 'x'",
    rank: str | None = "3",
    **more: object,
) -> None:
    body = {"pid": 7, "time": time, "rank": rank, "type": "KeyError", "message": message}
    (folder / f"7.{time}.json").write_text(json.dumps({**body, "failures": [], **more}))


def cause(
    folder: Path,
    *,
    failed: bool = True,
    out_of_memory: bool = False,
    running: Running = NOTHING,
) -> Cause:
    stop = StopRound(0, failed=failed)
    return cause_of_round(stop, STOPPED_AT, running, str(folder), out_of_memory)


def test_a_rank_that_had_failed_shortly_before_is_the_cause(tmp_path: Path) -> None:
    report(tmp_path, STOPPED_AT - 30)
    found = cause(tmp_path)
    assert (found.reason, found.rank, found.message) == ("Exception", 3, "KeyError: 'x'")
    assert found.exit_code == 1


@pytest.mark.parametrize(
    "time", [STOPPED_AT - 3600, STOPPED_AT - UNNOTICED_SECONDS, STOPPED_AT, STOPPED_AT + 1]
)
def test_an_old_exception_and_one_of_the_stop_itself_are_not(tmp_path: Path, time: float) -> None:
    report(tmp_path, time)
    assert cause(tmp_path).reason == "PeerFailed"


@pytest.mark.parametrize(
    ("rank", "pids", "ranks", "reason"),
    [
        ("3", {5, 6}, {None, 3}, "PeerFailed"),  # a child of the rank has failed
        (None, {5, 6}, {None, 3}, "PeerFailed"),  # a program that ran before the ranks
        ("3", {5, 7}, {None, 3}, "Exception"),  # an exception that has not ended its process yet
        ("3", {5, 6}, {None, 2}, "Exception"),  # torchrun ends the other ranks up to 30 s later
    ],
)
def test_a_rank_that_still_runs_has_not_failed(
    tmp_path: Path, rank: str | None, pids: set[int], ranks: set[int | None], reason: str
) -> None:
    report(tmp_path, STOPPED_AT - 20, rank=rank)
    running = Running(frozenset(pids), frozenset(ranks))
    assert cause(tmp_path, running=running).reason == reason


def test_the_exception_of_a_rank_is_the_cause_not_an_earlier_one_of_its_child(
    tmp_path: Path,
) -> None:
    report(tmp_path, STOPPED_AT - 30, "ModuleNotFoundError: flash_attn", nested=True)
    report(tmp_path, STOPPED_AT - 20)
    assert cause(tmp_path).message == "KeyError: 'x'"


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


AGREED = Stopped(52, was_asked=True, was_told=True)


@pytest.mark.parametrize(
    ("stopped", "reason", "message"),
    [
        (AGREED, "Stopped", "All ranks stopped at call 52, as they had agreed."),
        (
            AGREED._replace(was_asked=False),
            "PeerStopped",
            "All ranks stopped at call 52, as they had agreed. Another node was asked to end.",
        ),
        (
            AGREED._replace(was_told=False),
            "Stopped",
            "The ranks were killed before call 52, at which all were to stop.",
        ),
    ],
)
def test_ranks_that_have_agreed_to_stop_have_not_finished(
    stopped: Stopped, reason: str, message: str
) -> None:
    cause = cause_of_agreement(stopped, [])
    assert (cause.reason, cause.message, cause.exit_code, cause.signal) == (
        reason,
        message,
        143,
        15,
    )


def test_a_rank_that_fails_while_all_stop_is_named() -> None:
    reports = [
        Report(7, 2.0, 3, "OSError", "OSError: disk full", []),
        Report(8, 1.0, None, "SignalException", "of torchrun", []),
    ]
    cause = cause_of_agreement(AGREED, reports)
    assert cause.message == "The ranks stopped at call 52, and rank 3 failed: OSError: disk full"
