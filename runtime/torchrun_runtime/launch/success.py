"""Whether a command that ended with 0 has succeeded.

A shell returns 0 although its Python has failed (`python train.py | tee log`, `python train.py;
date`) or still runs in the background (`nohup python train.py &`). The shell's author may also mean
it: a check may fail, and a monitor may run beside the training. So only the last Python counts that
the command started, and none if the line says what to do after a failure (`||`).
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import NamedTuple

from .contract import LAUNCH_FAILED
from .failure import EXCEPTION, RECENT_SECONDS, Cause, Report, cause_of_account
from .output import timestamp
from .processes import Process, descendants

# How long a process that was just started may need to become a Python with a mark.
_START_SECONDS = 2.0
_POLL = 0.02
_STARTERS = re.compile(r"(ba|da|z|k|a)?sh|busybox|nohup|setsid|nice|env|python.*")
# A reader that closes its pipe, as `head` does, and Ctrl-C end a program that has not failed.
_NO_FAILURES = ("BrokenPipeError", "KeyboardInterrupt")
_LAST_STARTED, _LAST_ENDED = "python.started", "python.ended"


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
