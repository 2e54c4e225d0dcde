"""Handlers of SIGTERM and SIGINT for the whole life of the process.

The process is PID 1 of its container, and the kernel drops a signal to PID 1 that has no handler.
So handlers are installed before anything else is imported, and stay. A signal that comes before the
controller runs, or during its shutdown, ends the process at once.
"""

import asyncio  # the event loop's own interface for signals and file descriptors
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """The signal handlers, after `install`. Use in the main thread only."""

    def __init__(self) -> None:
        self._notify: Callable[[], object] | None = None  # set while `wait` waits; wakes it
        self._received: signal.Signals | None = None

    def install(self) -> "Signals":
        """Install the handlers."""
        for signum in _SIGNALS:
            signal.signal(signum, self._receive)
        return self

    async def wait(self) -> signal.Signals:
        """Wait for the first signal and return it. The next one ends the process."""
        loop, received = asyncio.get_running_loop(), asyncio.Event()
        _add_wakeup_reader(loop)
        self._notify = lambda: loop.call_soon_threadsafe(received.set)
        await received.wait()
        assert self._received is not None
        return self._received

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        notify, self._notify = self._notify, None
        if notify is None:
            _terminate(signum)
        else:
            self._received = signal.Signals(signum)
            notify()


def _add_wakeup_reader(loop: asyncio.AbstractEventLoop) -> None:
    """Let each signal wake the event loop, so that Python runs its handler.

    Python runs handlers in the main thread, between two bytecodes. A signal that arrives just
    before the loop polls, or in another thread, does not interrupt the poll.
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


def _terminate(signum: int) -> None:
    """End the process by the default action, so that the parent sees the signal."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # PID 1 has no default action
