"""The command's stdout and stderr, copied without delay and counted by the launcher.

Each has a pipe and is copied unbuffered to the container's stream of the same number, so that the
container's log is the same as without the launcher.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import Callable

from .state import start_thread

STDOUT, STDERR = 1, 2
_CHUNK = 64 << 10
_CLOSE_SECONDS = 2.0


class Streams:
    """Pipes for one command.

    ends: descriptors of its stdout and stderr. consume: gets stream and bytes of all output. It
    must not block.
    """

    def __init__(self, consume: Callable[[int, bytes], None]) -> None:
        self.chunks = 0  # grows whenever the command writes
        self._consume = consume
        out, err = os.pipe(), os.pipe()
        self._sources = {out[0]: STDOUT, err[0]: STDERR}
        self.ends = {STDOUT: out[1], STDERR: err[1]}
        self._thread = start_thread(self._pass_on)

    def close(self) -> None:
        """Wait for a bounded time until all output is copied.

        The pipes end once the launcher's copies of the command's ends are closed, too.
        """
        for descriptor in self.ends.values():
            os.close(descriptor)
        self._thread.join(_CLOSE_SECONDS)

    def _pass_on(self) -> None:
        poller = select.poll()
        for source in self._sources:
            poller.register(source, select.POLLIN)
        targets = dict(self._sources)
        while targets:
            for source, _ in poller.poll():
                data = os.read(source, _CHUNK)
                if not data:
                    poller.unregister(source)
                    os.close(source)
                    del targets[source]
                    continue
                self.chunks += 1
                _write(targets[source], data)
                self._consume(targets[source], data)


def _write(stream: int, data: bytes) -> None:
    """Write all of it. Errors are ignored, so that the command continues without its log."""
    view = memoryview(data)
    with suppress(OSError):
        while view:
            view = view[os.write(stream, view) :]
