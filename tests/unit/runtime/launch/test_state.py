"""Shared storage may hang, fail or be missing: none of it stops the launcher."""

import signal
import threading
from pathlib import Path

import pytest

from torchrun_runtime.launch import state


def test_a_directory_that_can_be_written_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    assert state.usable(str(tmp_path)) == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_none_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert state.usable("") == ""
    assert capfd.readouterr().err == ""


def test_what_is_missing_is_done_without(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert state.usable(str(tmp_path / "missing")) == ""
    assert "No such file or directory" in capfd.readouterr().err


def test_storage_that_hangs_is_not_waited_for() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        state.within(0.01, release.wait)
    release.set()


def test_what_fails_in_the_thread_is_raised() -> None:
    def fail() -> None:
        raise ValueError("there")

    with pytest.raises(ValueError, match="there"):
        state.within(5, fail)


def test_threads_leave_signals_to_the_main_thread() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    mask = state.within(5, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= mask
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
