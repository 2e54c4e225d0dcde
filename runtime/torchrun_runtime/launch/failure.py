"""Why a command failed, also if it ended with 0.

The root cause comes from the reports of the processes. Precedence: the report of torchrun (rank
and exit code), the report of the rank's Python (exception and time), the exit code of the command.
Among several failed ranks the first one is the cause; a rank that only lost a peer is not. Other
programs write reports, too: a rank may try an import in a child process, and go on when it fails.

A shell returns 0 although its Python has failed (`python train.py | tee log`, `python train.py;
date`) or still runs in the background (`nohup python train.py &`). The shell's author may also mean
it: a check may fail, and a monitor may run beside the training. So only the last Python counts that
the command started, and none if the line says what to do after a failure (`||`).
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from typing import NamedTuple

from .cause import Cause, tells_peer_loss
from .contract import LAUNCH_FAILED, NOT_FOUND, SDK_RAISED
from .output import timestamp
from .processes import Process, descendants, signal_name
from .supervise import CommandExit

_SIGABRT, _SIGKILL, _SIGTERM = 6, 9, 15
_TORCHRUN_FAILED = 1  # torchrun's exit code for any failing rank
EXCEPTION = 1  # exit code of a Python that an exception ends
# How long a script may take to end after a program in it has failed, in any other way.
RECENT_SECONDS = 3.0
# How long a process that was just started may need to become a Python with a mark.
_START_SECONDS = 2.0
_POLL = 0.02
_STARTERS = re.compile(r"(ba|da|z|k|a)?sh|busybox|nohup|setsid|nice|env|python.*")
# A reader that closes its pipe, as `head` does, and Ctrl-C end a program that has not failed.
_NO_FAILURES = ("BrokenPipeError", "KeyboardInterrupt")
_LAST_STARTED, _LAST_ENDED = "python.started", "python.ended"


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
            return (2 if tells_peer_loss(report.message) else 0), report.time
        # torchrun's time is truncated to whole seconds, so it is never too late.
        if failed.exit_code == -_SIGABRT:
            return 1, failed.time
        is_peer_loss = failed.exit_code > 0 and tells_peer_loss(failed.message)
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


class _Mark(NamedTuple):
    """When rank/sitecustomize.py left a mark, and in which process."""

    pid: int = 0
    time: float = 0.0


def find_background(folder: str) -> Process | None:
    """The last Python that the command started, if it still runs after the command has ended.

    A Python that was started before another one ended served that one. Takes at most 2 s, while a
    process that was just started may become a Python.
    """
    while True:
        tree = descendants(os.getpid())
        started, ended = _read(folder, _LAST_STARTED), _read(folder, _LAST_ENDED)
        found = [process for process in tree if process.pid == started.pid]
        if found and ended.time < started.time:
            return found[0]
        if not any(_STARTERS.fullmatch(p.name) and _age(p) < _START_SECONDS for p in tree):
            return None
        time.sleep(_POLL)


def cause_of_background(process: Process) -> Cause:
    """The cause of a command that ended while its training still ran."""
    message = (
        f"The command ended with 0 while {process.name}[{process.pid}], which it had started, still"
        " ran in the background. The end of the command ends the container. Remove nohup and &, or"
        " end the script with wait."
    )
    return Cause(LAUNCH_FAILED, None, None, "LeftInBackground", message, timestamp())


def find_masked_failure(
    command: str | list[str], reports: list[Report], folder: str, now: float
) -> Cause | None:
    """The failure of the last Python of a command, which itself ended with 0. now: its end."""
    line = command if isinstance(command, str) else " ".join(command)
    if "||" in line:
        return None
    started = _read(folder, _LAST_STARTED)
    last = [
        report
        for report in reports
        if report.time >= started.time
        and now - report.time < RECENT_SECONDS
        and report.type not in _NO_FAILURES
        and (report.failures or report.pid == started.pid)
    ]
    if not last:
        return None
    report = max(last, key=lambda report: report.time)
    if report.failures:
        return cause_of_account(report, reports)
    moment = timestamp(report.time)
    return Cause(EXCEPTION, None, None, "Exception", report.message, moment)


def _read(folder: str, name: str) -> _Mark:
    with suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
        pid, moment = file.read().split()
        return _Mark(int(pid), float(moment))
    return _Mark()


def _age(process: Process) -> float:
    """Seconds since the process was started; infinite if that is not known."""
    with suppress(OSError, ValueError), open("/proc/uptime") as file:
        return float(file.read().split()[0]) - process.started / os.sysconf("SC_CLK_TCK")
    return float("inf")
