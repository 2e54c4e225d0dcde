"""The command's stdout and stderr: passed on without delay, and copied to the job's storage.

Each has a pipe and is passed on unbuffered to the container's stream of the same number, so that
the container's log is the same as without the launcher. A copy of both outlives the pod:

<TORCHRUN_STATE_DIR>/logs/<attempt>/node-<index>.log has the newest part, up to 32 MiB, and
node-<index>.log.1 the 32 MiB before it. Lines have the format of container runtimes (CRI): time,
stream, F, text. The storage may be full, slow or hang forever, so a separate thread writes from a
bounded buffer. Output that does not fit is omitted, with a note in the copy.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Callable, NamedTuple

from .output import STDERR, say
from .threads import start_thread

STDOUT = 1
_CHUNK = 64 << 10
_CLOSE_SECONDS = 2.0
FILE_BYTES = 32 << 20
KEPT_ATTEMPTS = 5
_BUFFER_BYTES = 8 << 20
_WRITE_BYTES = 1 << 20
_LINE_BYTES = 64 << 10  # a line longer than that is cut
_RETRY_SECONDS = 10.0


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


class StreamLines(NamedTuple):
    """Complete lines of a stream (1 or 2). time: of their arrival, in nanoseconds since 1970."""

    time: int
    stream: int
    lines: bytes

    def stamped(self) -> bytes:
        """The lines, each prefixed with time and stream."""
        seconds, nanoseconds = divmod(self.time, 10**9)
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        stream = "stderr" if self.stream == STDERR else "stdout"
        mark = f"{clock}.{nanoseconds:09d}Z {stream} F ".encode()
        return mark + self.lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"


class Copy:
    """`add` accepts output and never waits for the storage; `close` waits for the rest."""

    def __init__(self, state: str, attempt: str, index: str, file_bytes: int = FILE_BYTES) -> None:
        self._logs = os.path.join(state, "logs")
        self._attempt = attempt
        self._index = index
        self._file_bytes = file_bytes
        self._path = os.path.join(self._logs, attempt, f"node-{index}.log")
        self._partial: dict[int, bytes] = {}  # by stream: the incomplete last line
        self._waiting: deque[StreamLines] = deque()
        self._size = 0  # bytes that wait or are being written, without times and streams
        self._left_out = 0  # bytes
        self._loss_reported = False
        self._closed = False
        self._change = threading.Condition()
        self._thread = start_thread(self._run)

    def add(self, stream: int, data: bytes) -> None:
        """Add output of a stream (1 or 2). Streams mix only between lines."""
        head, newline, tail = (self._partial.pop(stream, b"") + data).rpartition(b"\n")
        if len(tail) > _LINE_BYTES:
            head, newline, tail = head + newline + tail, b"\n", b""
        if tail:
            self._partial[stream] = tail
        self._put(stream, head + newline)

    def close(self, seconds: float) -> None:
        """Write the rest within this number of seconds."""
        for stream, tail in self._partial.items():
            self._put(stream, tail + b"\n")
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(seconds)

    def _put(self, stream: int, lines: bytes) -> None:
        if not lines:
            return
        first_loss = False
        with self._change:
            if self._size + len(lines) > _BUFFER_BYTES:
                first_loss, self._loss_reported = not self._loss_reported, True
                self._left_out += len(lines)
            else:
                self._queue_loss_note()
                self._queue(StreamLines(time.time_ns(), stream, lines))
                self._change.notify()
        if first_loss:
            _say_uncopied(f"{self._path} is too slow: the copy omits parts of this log")

    def _queue(self, entry: StreamLines) -> None:
        self._waiting.append(entry)
        self._size += len(entry.lines)

    def _queue_loss_note(self) -> None:
        if self._left_out:
            note = f"torchrun-launch: {self._left_out} bytes are missing here\n"
            self._left_out = 0
            self._queue(StreamLines(time.time_ns(), STDERR, note.encode()))

    def _run(self) -> None:
        descriptor, last_error = -1, ""
        while True:
            data, size = self._next()
            if not data:
                break
            try:
                if descriptor < 0:
                    descriptor = self._open()
                descriptor = self._write(descriptor, data)
            except OSError as error:
                if last_error != (
                    last_error := f"cannot copy this log to {self._path}: {error.strerror}"
                ):
                    _say_uncopied(last_error)
                descriptor = self._after_a_failure(descriptor, size)
            with self._change:
                self._size -= size
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def _next(self) -> tuple[bytes, int]:
        """Some of the waiting lines, formatted, and their size in bytes; nothing at the end."""
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
            data, size = bytearray(), 0
            while self._waiting and len(data) < _WRITE_BYTES:
                entry = self._waiting.popleft()
                data += entry.stamped()
                size += len(entry.lines)
            if not self._waiting:
                self._queue_loss_note()
            return bytes(data), size

    def _open(self) -> int:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        if self._index == "0":
            self._remove_old_attempts()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # Independent of the umask of the image: other users also read the logs.
        with suppress(OSError):
            for path in (self._logs, os.path.dirname(self._path)):
                os.chmod(path, 0o755)  # noqa: S103
        with suppress(OSError):
            os.fchmod(descriptor, 0o644)
        return descriptor

    def _remove_old_attempts(self) -> None:
        numbers = [int(name) for name in os.listdir(self._logs) if name.isdigit()]
        newest = sorted(number for number in numbers if number <= int(self._attempt or 0))
        for number in newest[:-KEPT_ATTEMPTS]:
            shutil.rmtree(os.path.join(self._logs, str(number)), ignore_errors=True)

    def _write(self, descriptor: int, data: bytes) -> int:
        view = memoryview(data)
        while view:
            room = self._file_bytes - os.fstat(descriptor).st_size
            if room <= 0:
                os.close(descriptor)
                os.replace(self._path, self._path + ".1")
                descriptor = self._open()
                room = self._file_bytes
            view = view[os.write(descriptor, view[:room]) :]
        return descriptor

    def _after_a_failure(self, descriptor: int, lost_bytes: int) -> int:
        """Close the file and pause, because a full disk or a stale file handle may recover."""
        with suppress(OSError):
            if descriptor >= 0:
                os.close(descriptor)
        with self._change:
            self._left_out += lost_bytes
            self._change.wait_for(lambda: self._closed, _RETRY_SECONDS)
        return -1


def _say_uncopied(text: str) -> None:
    """Log to the container only, because the copy has failed."""
    say(text, copied=False)
