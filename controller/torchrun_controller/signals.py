"""SIGTERM and SIGINT, from the first moment of the process to its last.

The process is PID 1 of its container, and for PID 1 the kernel drops a signal that has no handler.
So there is a handler before anything else is imported, and it stays: a signal that comes before
there is anything to end in order, or while that goes on, ends the process at once.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Handlers of both signals, once they are installed. For the main thread."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] | None = None  # there is somebody who ends in order
        self._received: signal.Signals | None = None

    def install(self) -> "Signals":
        """Have signals handled from now on."""
        for number in _SIGNALS:
            signal.signal(number, self._receive)
        return self

    async def wait(self) -> signal.Signals:
        """Wait for the first signal, and return which it is. The next one ends the process."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
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


def _end_at_once(number: int) -> None:
    """As if there were no handler: the parent sees which signal it was."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # as PID 1, which has no such default
