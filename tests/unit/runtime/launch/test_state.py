"""Shared storage that hangs, fails or is missing does not stop the launcher."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from torchrun_runtime.launch import state


def open_files() -> list[str]:
    """The open files of this process, also those that are deleted."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed in another thread
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return files


def test_a_writable_directory_is_used_unchanged(tmp_path: Path) -> None:
    assert state.usable(str(tmp_path)) == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert [file for file in open_files() if file.startswith(str(tmp_path))] == []


def test_no_state_directory(capfd: pytest.CaptureFixture[str]) -> None:
    assert state.usable("") == ""
    assert capfd.readouterr().err == ""


def test_a_missing_directory_is_ignored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert state.usable(str(tmp_path / "missing")) == ""
    assert "No such file or directory" in capfd.readouterr().err


def test_the_wait_for_hanging_storage_is_bounded() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match="no response"):
        state.within(0.01, release.wait)
    release.set()


def test_an_exception_of_the_thread_is_raised() -> None:
    def fail() -> None:
        raise ValueError("there")

    with pytest.raises(ValueError, match="there"):
        state.within(120, fail)


def test_threads_leave_signals_to_the_main_thread() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    mask = state.within(120, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= mask
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
