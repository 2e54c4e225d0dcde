"""SIGTERM and SIGINT, from the first moment of the process to its last.

The process is PID 1 of its container, and the kernel drops a signal to PID 1 that has no handler.
So handlers are installed before anything else is imported, and stay. A signal that comes before the
controller runs, or while it ends, ends the process at once.
"""

import asyncio  # the event loop's own interface for signals and file descriptors
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Handlers of both signals, once `install` was called. For the main thread."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] | None = None  # set while `wait` waits
        self._received: signal.Signals | None = None

    def install(self) -> "Signals":
        """Install the handlers."""
        for number in _SIGNALS:
            signal.signal(number, self._receive)
        return self

    async def wait(self) -> signal.Signals:
        """Wait for the first signal and return it. The next one ends the process."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        _wake_up_at_signals(loop)
        self._wake = lambda: loop.call_soon_threadsafe(told.set)
        await told.wait()
        assert self._received is not None
        return self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        wake, self._wake = self._wake, None
        if wake is None:
            _end_at_once(number)
        else:
            self._received = signal.Signals(number)
            wake()


def _wake_up_at_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Have each signal wake the event loop, so that its handler runs.

    Python runs handlers in the main thread, between two bytecodes. A signal that comes just before
    the loop polls, or in another thread, does not end that poll.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    existing = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if existing != -1:  # uvloop has its own
        signal.set_wakeup_fd(existing, warn_on_full_buffer=False)
        reader.close()
        writer.close()
        return
    writer.detach()  # the signals use it until the process ends
    loop.add_reader(reader, reader.recv, 4096)


def _end_at_once(number: int) -> None:
    """End as without a handler: the parent process sees which signal it was."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # as PID 1, which has no such default
