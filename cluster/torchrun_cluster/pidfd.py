"""File descriptors of processes, for Pythons that were built for a Linux older than 5.3 as well.

Portable builds of Python have neither os.pidfd_open nor signal.pidfd_send_signal, whatever kernel
they run on. The system calls have the same numbers on x86-64 and arm64.
"""

from __future__ import annotations

import ctypes
import os
import signal

_SEND_SIGNAL, _OPEN = 424, 434


def open_pid(pid: int) -> int:
    """A descriptor that stays that of this process. Raises ProcessLookupError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_OPEN, pid, 0)


def send_signal(handle: int, number: int) -> None:
    """Raises ProcessLookupError where the process has ended."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(handle, number)
    else:
        _call(_SEND_SIGNAL, handle, number, None, 0)


def _call(number: int, *arguments: int | None) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
