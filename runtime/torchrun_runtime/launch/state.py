"""The state directory, on the PVC that all workers share.

It is shared storage and may hang, be full or be missing. No function blocks the caller for longer
than documented.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from concurrent.futures import Future, wait
from typing import Callable, TypeVar

from .output import say

_PROBE_SECONDS = 10.0

T = TypeVar("T")


def usable(directory: str, seconds: float = _PROBE_SECONDS) -> str:
    """The directory if files can be created in it; else "", with a line in the log."""
    if not directory:
        return ""
    try:
        within(seconds, lambda: _probe(directory))
    except OSError as error:
        say(f"running without the state directory {directory}: {error.strerror or error}")
        return ""
    return directory


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return or raise what `work` does. Raises TimeoutError if it takes longer.

    A thread that the storage blocks forever remains until the process ends.
    """
    result = begin(work)
    if not wait([result], seconds).done:
        raise TimeoutError(f"no response within {seconds:.0f} s")
    return result.result()


def begin(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread. The Future has what it returns or raises."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    start_thread(run)
    return result


def start_thread(run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread with all signals blocked: the main thread handles them."""
    thread = threading.Thread(target=run, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def _probe(directory: str) -> None:
    descriptor, path = tempfile.mkstemp(prefix=".probe-", dir=directory)
    os.close(descriptor)
    os.unlink(path)
