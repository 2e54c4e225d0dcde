"""The root cause of a failure, from the reports of the ranks and of torchrun."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from torchrun_runtime.launch.cause import Cause, first_cause
from torchrun_runtime.launch.failure import Failed, Report, find_cause, read_reports
from torchrun_runtime.launch.supervise import CommandExit
from torchrun_runtime.launch.watchdogs import OomWatchdog, oom_kills


def exit_of(code: int, signal: int | None = None) -> CommandExit:
    return CommandExit(
        exit_code=code,
        signal=signal,
        stopped_by=None,
        stop_request=None,
        for_next_round=False,
        has_survivors=False,
    )


FAILED = exit_of(1)
CLOSED = "RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:4711"


def rank(number: int, time: float, message: str) -> Report:
    return Report(100 + number, time, number, message.split(":")[0], message, [])


def agent(*failures: Failed, time: float = 1000.0) -> Report:
    return Report(99, time, None, "ChildFailedError", "", list(failures))


def failed(number: int, exit_code: int, time: float) -> Failed:
    return Failed(number, 100 + number, exit_code, time, "")


def cause(*reports: Report, ended: CommandExit = FAILED, out_of_memory: bool = False) -> Cause:
    return find_cause(ended, list(reports), 2000.0, out_of_memory)


def test_an_exception_names_rank_and_last_line() -> None:
    root_cause = cause(rank(1, 10.5, "ValueError: bad batch"), agent(failed(1, 1, 10)))
    assert root_cause == Cause(
        1, 1, None, "Exception", "ValueError: bad batch", "1970-01-01T00:00:10.500000Z"
    )


def test_the_first_exception_by_time_is_the_cause() -> None:
    root_cause = cause(
        rank(0, 10.9, "KeyError: 'b'"),
        rank(3, 10.2, "ValueError: a"),
        agent(failed(0, 1, 10), failed(3, 1, 10)),
    )
    assert root_cause.rank == 3


def test_the_last_exception_of_a_rank_is_its_cause() -> None:
    """The rank is a shell: both reports are of its children."""
    first, last = (
        rank(1, time, f"ValueError: at {time}")._replace(pid=pid) for time, pid in ((8, 7), (9, 8))
    )
    for reports in ((first, last), (last, first)):
        assert cause(*reports, agent(failed(1, 1, 10))).message == "ValueError: at 9"


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        "torch.distributed.DistBackendError: NCCL error: "
        "remote process exited or there was a network error",
    ],
)
def test_noticing_a_dead_peer_is_not_the_cause(message: str) -> None:
    root_cause = cause(rank(0, 10.1, message), agent(failed(0, 1, 10), failed(1, -9, 11)))
    assert (root_cause.rank, root_cause.exit_code, root_cause.signal) == (1, 137, 9)
    assert "SIGKILL" in root_cause.message


# The causes of several nodes: each one here comes before the next, whatever their times.
BY_PRECEDENCE = [
    Cause(137, 0, 9, "OOMKilled", "", ""),
    Cause(124, None, None, "Hung", "", ""),
    Cause(137, 0, 9, "Signaled", "", ""),
    Cause(1, 0, None, "Exception", "ValueError: no", ""),
    Cause(1, 0, None, "Exception", CLOSED, ""),
    Cause(143, None, 15, "Stopped", "", ""),
]


@pytest.mark.parametrize(("first", "second"), [*pairwise(BY_PRECEDENCE)])
def test_the_cause_of_a_gang_is_found_by_its_kind(first: Cause, second: Cause) -> None:
    early, late = second._replace(time="2026-01-01"), first._replace(time="2026-01-02")
    assert first_cause({0: early, 1: late}) == (1, late)


@pytest.mark.parametrize("kind", BY_PRECEDENCE)
def test_the_cause_of_a_gang_is_the_first_one_of_its_kind(kind: Cause) -> None:
    early, late = kind._replace(time="2026-01-01"), kind._replace(time="2026-01-02")
    assert first_cause({0: late, 1: early}) == (1, early)


def test_a_shell_whose_program_exceeded_the_memory_reports_it_by_its_exit_code() -> None:
    for ended in (exit_of(137), exit_of(1)):
        reports = () if ended.exit_code == 137 else (agent(failed(1, 137, 10)),)
        root_cause = cause(*reports, ended=ended, out_of_memory=True)
        assert (root_cause.reason, root_cause.signal) == ("OOMKilled", 9)
        assert cause(*reports, ended=ended).reason == "ExitCode"


def test_what_torchrun_stopped_is_not_the_cause() -> None:
    root_cause = cause(agent(failed(0, -15, 10), failed(1, 9, 10)))
    assert (root_cause.rank, root_cause.exit_code, root_cause.reason) == (1, 9, "ExitCode")


def test_a_lost_peer_is_the_cause_if_there_is_no_other() -> None:
    root_cause = cause(rank(0, 10.1, CLOSED), agent(failed(0, 1, 10)))
    assert (root_cause.rank, root_cause.message) == (0, CLOSED)


def test_a_rank_behind_a_shell_is_found_by_its_number() -> None:
    report = rank(1, 10.5, "ValueError: x")._replace(pid=4711)
    root_cause = cause(report, agent(failed(1, 3, 10)))
    assert (root_cause.message, root_cause.exit_code) == ("ValueError: x", 3)


def old_report(rank: int | None, *, nested: bool) -> Report:
    return Report(4711, 10.0, rank, "E", "ModuleNotFoundError: flash_attn", [], nested)


@pytest.mark.parametrize("nested", [True, False])
def test_an_old_exception_of_another_process_does_not_explain_its_own_exit_code(
    nested: bool,
) -> None:
    report = old_report(None, nested=nested)
    assert cause(report, ended=exit_of(3)).reason == "ExitCode"
    of_rank = cause(report._replace(rank=1), agent(failed(1, 3, 1000.0)))
    assert (of_rank.rank, of_rank.exit_code, of_rank.reason) == (1, 3, "ExitCode")


def test_a_shell_may_take_long_to_end_after_an_exception_but_a_rank_may_end_without() -> None:
    """An exception ends Python with exit code 1."""
    for nested, reason in ((False, "Exception"), (True, "ExitCode")):
        report = old_report(None, nested=nested)
        assert cause(report).reason == reason
        assert cause(report._replace(rank=1), agent(failed(1, 1, 1000.0))).reason == reason


@pytest.mark.parametrize("code", [1, 3])
def test_a_wrapper_that_ends_after_its_child_keeps_the_message(code: int) -> None:
    report = old_report(None, nested=True)._replace(time=1998.0)
    assert cause(report, ended=exit_of(code)).message == "ModuleNotFoundError: flash_attn"


def test_a_shell_that_replaces_the_exit_code_of_torchrun_keeps_the_message() -> None:
    reports = rank(1, 10.0, "ValueError: x"), agent(failed(1, 1, 11), time=40.0)
    root_cause = cause(*reports, ended=exit_of(42))
    assert (root_cause.exit_code, root_cause.message) == (42, "ValueError: x")


def test_reports_of_an_earlier_try_do_not_count() -> None:
    early = rank(1, 5.0, "ValueError: first try")._replace(pid=55)
    root_cause = cause(early, rank(1, 10.5, "KeyError: last try"), agent(failed(1, 1, 10)))
    assert root_cause.message == "KeyError: last try"


def test_the_last_account_of_torchrun_counts() -> None:
    root_cause = cause(agent(failed(0, 7, 10)), agent(failed(1, 9, 20), time=1001.0))
    assert root_cause.exit_code == 9


def test_a_signal_with_an_oom_kill_is_out_of_memory() -> None:
    root_cause = cause(agent(failed(1, -9, 10)), out_of_memory=True)
    assert (root_cause.reason, root_cause.exit_code) == ("OOMKilled", 137)
    assert cause(agent(failed(1, -11, 10)), out_of_memory=True).reason == "Signaled"


def test_the_exit_code_is_that_of_the_command() -> None:
    root_cause = cause(agent(failed(1, 9, 10)), ended=exit_of(42))
    assert root_cause.exit_code == 42


def test_a_command_without_ranks() -> None:
    assert cause(ended=exit_of(3)).exit_code == 3
    assert cause(ended=exit_of(139, 11)).signal == 11
    report = Report(7, 10.0, None, "ValueError", "ValueError: x", [])
    assert cause(report).message == "ValueError: x"
    assert "not found" in cause(ended=exit_of(127)).message


def test_the_message_names_the_rank_and_its_end() -> None:
    assert cause(ended=exit_of(137, 9)).message == "The command was killed by SIGKILL."
    assert cause(agent(failed(1, -11, 10))).message == "Rank 1 was killed by SIGSEGV."
    assert cause(agent(failed(0, -9, 10)), out_of_memory=True).message == (
        "Rank 0 exceeded the memory limit. Raise it, or use less memory."
    )
    assert cause(ended=exit_of(3)).message == ("The command ended with exit code 3. See its log.")
    assert cause(agent(failed(1, 127, 10))).message == (
        "Rank 1 ended with exit code 127. A program was not found."
    )


def test_unreadable_reports_are_ignored(tmp_path: Path) -> None:
    good = {"pid": 1, "time": 2.0, "rank": "3", "type": "E", "message": "E: x", "failures": []}
    (tmp_path / "1.json").write_text(json.dumps(good))
    (tmp_path / "1n.json").write_text(json.dumps({**good, "nested": True}))
    (tmp_path / "2.json").write_text("{")
    (tmp_path / "3.json").write_text("[]")
    (tmp_path / "4.json.tmp").write_text(json.dumps(good))
    assert read_reports(str(tmp_path)) == [
        Report(1, 2.0, 3, "E", "E: x", []),
        Report(1, 2.0, 3, "E", "E: x", [], nested=True),
    ]
    assert read_reports(str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("low 0\nhigh 0\nmax 12\noom 2\noom_kill 3\noom_group_kill 0\n", 3),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", 1),
        ("", 0),
    ],
)
def test_reads_the_kills_of_both_cgroup_versions(tmp_path: Path, text: str, kills: int) -> None:
    file = tmp_path / "memory.events"
    file.write_text(text)
    assert oom_kills((str(tmp_path / "none"), str(file))) == kills


def test_an_oom_kill_counts_for_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kills, now = [2], [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watchdog = OomWatchdog(lambda: kills[0])
    assert not watchdog.has_killed(), "kills before this command are not its own"
    kills[0] = 3
    assert watchdog.check() is None
    now[0] = 139.0
    assert watchdog.has_killed(40)
    now[0] = 141.0
    assert (watchdog.has_killed(40), watchdog.has_killed()) == (False, True)


BAD_BATCH = "ValueError: bad batch"


@pytest.mark.parametrize(
    ("reports", "failures"),
    [
        # Rank 1 raises and needs seconds to end; rank 0 loses it and ends first.
        ([rank(1, 10.5, BAD_BATCH), rank(0, 11.0, CLOSED)], [failed(0, 1, 11)]),
        ([rank(1, 10.5, BAD_BATCH)], [failed(0, -6, 11)]),
        ([rank(1, 10.5, BAD_BATCH)], [failed(0, -6, 10)]),
        # torchrun stops the rank that raised.
        ([rank(1, 10.5, BAD_BATCH)], [failed(0, -6, 11), failed(1, -15, 11)]),
        ([rank(1, 10.5, BAD_BATCH), rank(0, 11.0, CLOSED)], [failed(0, 1, 11), failed(1, -6, 12)]),
    ],
)
def test_a_rank_that_raised_is_the_cause_however_it_ends(
    reports: list[Report], failures: list[Failed]
) -> None:
    root_cause = cause(*reports, agent(*failures, time=13.0))
    assert (root_cause.rank, root_cause.reason, root_cause.message) == (1, "Exception", BAD_BATCH)


def test_an_exception_after_the_failure_is_not_its_cause() -> None:
    late = rank(1, 19.5, "ValueError: of the clean-up")
    root_cause = cause(late, agent(failed(0, -11, 11), time=20.0))
    assert (root_cause.rank, root_cause.signal) == (0, 11)


def test_an_exception_on_another_node_comes_before_an_abort() -> None:
    raised = Cause(1, 1, None, "Exception", BAD_BATCH, "1970-01-01T00:00:12.000000Z")
    aborted = Cause(134, 0, 6, "Signaled", "aborted", "1970-01-01T00:00:10.000000Z")
    lost = Cause(1, 2, None, "Exception", CLOSED, "1970-01-01T00:00:09.000000Z")
    assert first_cause({0: aborted, 1: raised, 2: lost}) == (1, raised)
    assert first_cause({0: aborted, 2: lost}) == (0, aborted)
