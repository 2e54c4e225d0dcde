"""The output of the launcher: lines on stderr, and a termination message for the controller."""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Callable, Iterator, Sequence

_LARGEST_MESSAGE = 4096  # bytes that the kubelet keeps
# Checkpoints and characters of the text in a termination message: the first that are small enough.
# A character takes up to six bytes.
_SIZES = ((3, 600), (1, 600), (1, 200), (0, 600))
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"  # RFC 3339 in UTC with microseconds

STDERR = 2
_READER_MILLISECONDS = 2000  # for a reader of a full pipe
_unread: set[int] = set()  # streams whose pipe was full for so long
_copies: list[Callable[[int, bytes], None]] = []


def counted(files: int) -> str:
    """A number of files, for log lines."""
    return "1 file" if files == 1 else f"{files} files"


def say(text: str, *, copied: bool = True) -> None:
    """Write one line with the mark of the launcher."""
    write_log(f"torchrun-launch: {text}\n".encode(errors="backslashreplace"), copied=copied)


def write_log(data: bytes, *, copied: bool = True) -> None:
    """Write complete lines to stderr as `write_lines`, and to the copies."""
    write_lines(STDERR, data)
    for copy in _copies if copied else ():
        copy(STDERR, data)


@contextmanager
def copied_to(copy: Callable[[int, bytes], None]) -> Iterator[None]:
    """Give `copy` the stream and the bytes of all output of the launcher while the block runs."""
    _copies.append(copy)
    try:
        yield
    finally:
        _copies.remove(copy)


def write_lines(stream: int, data: bytes) -> None:
    """Write complete lines to a file descriptor; without them if nobody reads it for some seconds.

    Does not use sys.stderr: a signal handler must not enter its buffer a second time.
    """
    view = memoryview(data)
    poller = select.poll()
    poller.register(stream, select.POLLOUT)
    with suppress(OSError):
        while view:
            if not poller.poll(0 if stream in _unread else _READER_MILLISECONDS):
                _unread.add(stream)  # the end of the program must not wait for a reader
                break
            _unread.discard(stream)
            # A pipe that is ready takes so many bytes at once.
            view = view[os.write(stream, view[: select.PIPE_BUF]) :]


def timestamp(seconds: float | None = None) -> str:
    """A time as in TIME_FORMAT. Default: now."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
    return moment.strftime(TIME_FORMAT)


class TerminationLog:
    """The file of the termination message, the last word of a container to the controller.

    restarts_in_place: how often the ranks were started again after a failure. checkpoints: the
    newest complete ones as JSON objects, the newest first.
    """

    def __init__(self, path: str) -> None:
        self.restarts_in_place = 0
        self.checkpoints: Callable[[], Sequence[dict[str, object]]] = tuple
        self._path = path

    def write(self, body: dict[str, object]) -> None:
        """Write the message if the kubelet has created the file for it."""
        restarts = {"restartsInPlace": self.restarts_in_place} if self.restarts_in_place else {}
        self._write({**body, **restarts}, valid_text(str(body.get("message", ""))))

    def write_success(self) -> None:
        """Write the checkpoints, if there are any."""
        if self.checkpoints():
            self._write({}, "")

    def _write(self, body: dict[str, object], text: str) -> None:
        newest = list(self.checkpoints())
        for count, characters in _SIZES:
            message = {"message": text[:characters]} if body else {}
            kept = {"checkpoints": newest[:count]} if newest[:count] else {}
            content = json.dumps({**body, **message, **kept}, ensure_ascii=False).encode()
            if len(content) <= _LARGEST_MESSAGE:
                break
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_TRUNC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)


def valid_text(text: str) -> str:
    """The text with a question mark for each lone surrogate, which is no valid JSON."""
    return text.encode("utf-8", "replace").decode()


def wait_until(
    ready: Callable[[], bool],
    seconds: float,
    waiting_for: str,
    pause: float = 0.2,
    longest_pause: float = 1.0,
) -> bool:
    """Poll until ready, at most for `seconds`; log every 10 s. Returns whether it is ready."""
    start = last_line = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now - start >= seconds:
            return False
        if now - last_line >= 10:
            last_line = now
            bound = f" of at most {seconds:.0f}" if seconds < float("inf") else ""
            say(f"waiting for {waiting_for} ({now - start:.0f}{bound} s)")
        time.sleep(min(pause, max(0.0, start + seconds - now)))
        pause = min(pause * 1.5, longest_pause)
    return True
