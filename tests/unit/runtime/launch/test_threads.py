"""Shared storage that hangs or fails does not stop the launcher."""

import signal
import threading

import pytest

from torchrun_runtime.launch import threads


def test_the_wait_for_hanging_storage_is_bounded() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match="no response"):
        threads.within(0.01, release.wait)
    release.set()


def test_an_exception_of_the_thread_is_raised() -> None:
    def fail() -> None:
        raise ValueError("there")

    with pytest.raises(ValueError, match="there"):
        threads.within(120, fail)


def test_threads_leave_signals_to_the_main_thread() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    mask = threads.within(120, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= mask
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
