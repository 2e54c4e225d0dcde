"""Every Python of the command loads it from PYTHONPATH. It writes a report if the process fails.

torchrun exits with 1 for any failing rank, and a rank without @record writes no error file. So two
kinds of processes write a report when an exception ends them: a rank (which exception, and when),
and torchrun itself, whose ChildFailedError has every rank's exit code.
If the launcher watches for hangs, each Python also registers faulthandler on a real-time signal
(TORCHRUN_STACK_SIGNAL), to write the stacks of all its threads to a separate file.
This module must not disturb the program: all errors are suppressed.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from types import TracebackType

_FOLDER = os.environ.get("TORCHRUN_LAUNCH_REPORTS", "")
_OUTER_PYTHON = "TORCHRUN_OUTER_PYTHON"  # pid and RANK
_nested = False
_LONGEST = 2000  # characters of a message


def _report(kind: type[BaseException], value: BaseException) -> None:
    import json
    import traceback

    failures = getattr(value, "failures", None)
    body = {
        "pid": os.getpid(),
        "time": time.time(),
        "rank": os.environ.get("RANK"),
        "nested": _nested,
        "type": kind.__name__,
        "message": traceback.format_exception_only(kind, value)[-1].strip()[:_LONGEST],
        "failures": [
            {
                "rank": rank,
                "pid": failure.pid,
                "exitcode": failure.exitcode,
                "time": failure.timestamp,
                "message": _text(failure.message),
            }
            for rank, failure in (failures.items() if isinstance(failures, dict) else ())
        ],
    }
    path = os.path.join(_FOLDER, f"{os.getpid()}.{time.time_ns()}.json")
    with open(path + ".tmp", "w") as file:
        json.dump(body, file)
    os.replace(path + ".tmp", path)


def _text(message: object) -> str:
    """The message in an error file of torch: a string, or an object that contains it."""
    return str(message.get("message", "") if isinstance(message, dict) else message)[:_LONGEST]


def _watch_exceptions() -> None:
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        with suppress(BaseException):
            _report(kind, value)
        before(kind, value, traceback)
        if isinstance(getattr(value, "failures", None), dict):
            _leave_torchrun()

    sys.excepthook = excepthook


def _leave_torchrun() -> None:
    """Exit at once: torchrun has ended its ranks, and to unload torch takes another 0.3 s."""
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _offer_stacks(number: int) -> None:
    """Register faulthandler, also in each forked child, with a file for each process."""
    import faulthandler
    import fcntl

    def register() -> None:
        path = os.path.join(_FOLDER, f"stack.{os.getpid()}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # A high number, which programs that close and reuse descriptors do not use.
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 200)
        os.close(descriptor)
        faulthandler.register(number, file=high, all_threads=True)
        descriptors.append(high)

    def after_fork() -> None:
        with suppress(BaseException):
            os.close(descriptors.pop())
            register()

    descriptors: list[int] = []
    register()
    os.register_at_fork(after_in_child=after_fork)


def _is_nested() -> bool:
    """Whether a Python of the same rank is above this process; the first one tells the others."""
    rank = os.environ.get("RANK", "")
    outer, _, outer_rank = os.environ.get(_OUTER_PYTHON, "").partition(" ")
    if outer and outer_rank == rank:
        return outer != str(os.getpid())  # the same if it executes another program
    os.environ[_OUTER_PYTHON] = f"{os.getpid()} {rank}"
    return False


def _load_shadowed() -> None:
    """Run the sitecustomize of the image, which this module hides. It may change sys.path."""
    here = os.path.dirname(os.path.abspath(__file__))
    own_entries = [pair for pair in enumerate(sys.path) if os.path.abspath(pair[1]) == here]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError:
        if own is not None:
            sys.modules["sitecustomize"] = own
    finally:
        for index, entry in own_entries:
            if entry not in sys.path:
                sys.path.insert(index, entry)


if _FOLDER and os.path.isdir(_FOLDER):
    _watch_exceptions()
    with suppress(BaseException):
        _nested = _is_nested()
    with suppress(BaseException):
        _offer_stacks(int(os.environ["TORCHRUN_STACK_SIGNAL"]))
_load_shadowed()
