"""The root cause of a failed command, from the reports of its processes.

Precedence: the report of torchrun (rank and exit code), the report of the rank's Python (exception
and time), the exit code of the command. Among several failed ranks the first one is the cause; a
rank that only lost a peer is not. Other programs write reports, too: a rank may try an import in a
child process, and go on when it fails.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Mapping, NamedTuple

from .contract import NOT_FOUND, PEER_LOSS, SDK_RAISED
from .output import timestamp
from .processes import signal_name
from .supervise import CommandExit

_PEER_LOSS = re.compile("|".join(PEER_LOSS), re.IGNORECASE)
_SIGABRT, _SIGKILL, _SIGTERM = 6, 9, 15
_TORCHRUN_FAILED = 1  # torchrun's exit code for any failing rank
EXCEPTION = 1  # exit code of a Python that an exception ends
# How long a script may take to end after a program in it has failed, in any other way.
RECENT_SECONDS = 3.0


class Report(NamedTuple):
    """An exception that ended a process.

    failures: those that torchrun lists; else empty. nested: another Python of the same rank is
    above the process.
    """

    pid: int
    time: float
    rank: int | None
    type: str
    message: str
    failures: list[Failed]
    nested: bool = False


class Failed(NamedTuple):
    """The end of one rank, by torchrun; exit_code is negative for a signal."""

    rank: int
    pid: int
    exit_code: int
    time: float
    message: str


class Cause(NamedTuple):
    """The cause in the termination message. exit_code: of the container."""

    exit_code: int
    rank: int | None
    signal: int | None
    reason: str
    message: str
    time: str

    def body(self) -> dict[str, object]:
        """The termination message for the controller."""
        return {
            "rank": self.rank,
            "exitCode": self.exit_code,
            "signal": self.signal,
            "reason": self.reason,
            "message": self.message,
            "time": self.time,
        }


def is_peer_loss(cause: Cause) -> bool:
    """Whether a rank only lost its peer, so that the cause is on another node."""
    return cause.reason in ("Exception", "ExitCode") and bool(_PEER_LOSS.search(cause.message))


def first_cause(causes: Mapping[int, Cause]) -> tuple[int, Cause]:
    """The node with the root cause, and the cause: a hang, a signal, the first exception.

    NCCL aborts the ranks that have lost a peer, so SIGABRT comes after exceptions.

    The order is that of the controller (torchrun_controller.reconcile.gang.failures).
    """

    def order(node_and_cause: tuple[int, Cause]) -> tuple[int, str]:
        cause = node_and_cause[1]
        if cause.reason == "OOMKilled":
            return 0, cause.time
        if cause.reason == "Hung":
            return 1, cause.time
        if cause.signal == _SIGTERM:
            return 6, cause.time
        if cause.signal is not None:
            return (4 if cause.signal == _SIGABRT else 2), cause.time
        return (5 if is_peer_loss(cause) else 3), cause.time

    return min(causes.items(), key=order)


def find_cause(
    command_exit: CommandExit, reports: list[Report], now: float, out_of_memory: bool
) -> Cause:
    """The cause of the failure of the command; `command_exit` must not be a success.

    now: seconds since the epoch. out_of_memory: the kernel killed a process of this container.
    """
    accounts = [report for report in reports if report.failures]
    if accounts and command_exit.exit_code == _TORCHRUN_FAILED:
        account = max(accounts, key=lambda report: report.time)
        return cause_of_account(account, reports, out_of_memory)
    if command_exit.signal is not None:
        return _of_signal(None, command_exit.signal, now, out_of_memory)
    failed = {failed.pid for account in accounts for failed in account.failures}
    others = [
        report
        for report in reports
        if not report.failures
        and (report.pid in failed or _explains(report, command_exit.exit_code, now))
    ]
    if others:
        last = max(others, key=lambda report: report.time)
        return Cause(
            command_exit.exit_code, last.rank, None, "Exception", last.message, timestamp(last.time)
        )
    return _of_exit(None, command_exit.exit_code, now, out_of_memory)


def cause_of_account(account: Report, reports: list[Report], out_of_memory: bool = False) -> Cause:
    """The cause in an account of torchrun: the first rank that failed."""
    failures = account.failures
    by_pid = {report.pid: report for report in reports}
    by_time = sorted(reports, key=lambda report: report.time, reverse=True)

    def report_of(failed: Failed) -> Report | None:
        of_rank = (report for report in by_time if report.rank == failed.rank)
        explaining = (r for r in of_rank if _explains(r, failed.exit_code, failed.time))
        return by_pid.get(failed.pid) or next(explaining, None)

    def order(failed: Failed) -> tuple[int, float]:
        report = report_of(failed)
        if report:
            return (2 if _PEER_LOSS.search(report.message) else 0), report.time
        # torchrun's time is truncated to whole seconds, so it is never too late.
        if failed.exit_code == -_SIGABRT:
            return 1, failed.time
        is_peer_loss = failed.exit_code > 0 and _PEER_LOSS.search(failed.message)
        return (2 if failed.exit_code == -_SIGTERM or is_peer_loss else 0), failed.time

    first = min([*failures, *_unlisted(failures, reports)], key=order)
    report = report_of(first)
    if report:  # whatever ended the rank afterwards, as SIGTERM of torchrun
        code = first.exit_code if first.exit_code > 0 else EXCEPTION
        moment = timestamp(report.time)
        return Cause(code, first.rank, None, "Exception", report.message, moment)
    if first.exit_code < 0:
        return _of_signal(first.rank, -first.exit_code, first.time, out_of_memory)
    return _of_exit(first.rank, first.exit_code, first.time, out_of_memory)


def _unlisted(failures: list[Failed], reports: list[Report]) -> list[Failed]:
    """The ranks that an exception was ending when torchrun looked at the others.

    A rank may need seconds to end, for example while NCCL aborts. torchrun lists only those that
    had ended, and stops the rest.
    """
    listed = {failed.rank for failed in failures}
    last = max(failed.time for failed in failures) + 1.0  # whole seconds
    return [
        Failed(report.rank, report.pid, EXCEPTION, report.time, report.message)
        for report in reports
        if report.rank is not None
        and report.rank not in listed
        and not (report.failures or report.nested)
        and report.time <= last
    ]


def _explains(report: Report, exit_code: int, ended_at: float) -> bool:
    """Whether the exception is why a program around its process ended with the exit code."""
    if ended_at - report.time < RECENT_SECONDS or exit_code == SDK_RAISED:
        return True
    return exit_code == EXCEPTION and not report.nested


def _of_signal(rank: int | None, number: int, time: float, out_of_memory: bool) -> Cause:
    if out_of_memory and number == _SIGKILL:
        return out_of_memory_of(rank, time)
    message = f"{_name(rank)} was killed by {signal_name(number)}."
    return Cause(128 + number, rank, number, "Signaled", message, timestamp(time))


def out_of_memory_of(rank: int | None, time: float) -> Cause:
    """The cause of a rank that the kernel killed at the memory limit; None if unknown which."""
    message = f"{_name(rank)} exceeded the memory limit. Raise it, or use less memory."
    return Cause(128 + _SIGKILL, rank, _SIGKILL, "OOMKilled", message, timestamp(time))


def _name(rank: int | None) -> str:
    return "The command" if rank is None else f"Rank {rank}"


def _of_exit(rank: int | None, code: int, time: float, out_of_memory: bool) -> Cause:
    if out_of_memory and code == 128 + _SIGKILL:  # a shell, whose program was killed
        return out_of_memory_of(rank, time)
    hint = "A program was not found." if code == NOT_FOUND else "See its log."
    message = f"{_name(rank)} ended with exit code {code}. {hint}"
    return Cause(code, rank, None, "ExitCode", message, timestamp(time))


def read_reports(folder: str) -> list[Report]:
    """The reports of the command's processes in `folder`, without unreadable ones."""
    reports = []
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.endswith(".json"):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    reports.append(_read_report(os.path.join(folder, name)))
    return reports


def _read_report(path: str) -> Report:
    with open(path) as file:
        body = json.load(file)
    rank = body["rank"]
    failures = [
        Failed(
            int(failure["rank"]),
            failure["pid"],
            failure["exitcode"],
            failure["time"],
            failure["message"],
        )
        for failure in body["failures"]
    ]
    return Report(
        body["pid"],
        body["time"],
        int(rank) if rank is not None else None,
        body["type"],
        body["message"],
        failures,
        body.get("nested", False),
    )
