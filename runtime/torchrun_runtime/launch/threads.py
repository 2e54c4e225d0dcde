"""Threads for work that may block forever, such as a read of shared storage."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, wait
from typing import Callable, TypeVar

T = TypeVar("T")


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
