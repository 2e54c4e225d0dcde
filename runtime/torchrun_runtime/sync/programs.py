"""Other programs: started with argument lists, progress logged, time and output limited."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.report import log

_KEPT_LINES = 40
_LONGEST_LINE = 500
_PROGRESS_SECONDS = 5.0
_LINE_END = re.compile(rb"[\r\n]")


@dataclass(frozen=True)
class ProgramResult:
    """exit_code: negative for a signal; output: the last lines on stderr."""

    exit_code: int
    output: str


class Programs:
    """Settings of all programs of one sync.

    deadline: of time.monotonic(); largest: maximum size of a file that a program writes, in bytes;
    scrub: removes secrets from output.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        deadline: float,
        largest: int,
        scrub: Callable[[str], str] = str,
    ) -> None:
        self._environment = dict(environment)
        self._deadline = deadline
        self._scrub = scrub
        self.largest = largest

    def run(self, *command: str) -> ProgramResult:
        """Run to the end and keep its stderr. Raises SyncError (FetchFailed)."""
        with self._started(command, subprocess.DEVNULL) as process:
            assert process.stderr
            lines = _follow(process.stderr, command, self._scrub)
            return ProgramResult(process.wait(), "\n".join(lines))

    @contextmanager
    def reading(self, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run and return its stdin and stdout; stderr is discarded."""
        with self._started(command, subprocess.PIPE) as process:
            yield process

    def text(self, *command: str, longest: int = 1 << 16) -> str:
        """The first `longest` bytes of its output; "" if it fails."""
        with self.reading(*command) as process:
            assert process.stdout
            printed = process.stdout.read(longest)
            process.stdout.close()
            return printed.decode(errors="replace").strip() if process.wait() == 0 else ""

    def check_time(self) -> None:
        """Raises SyncError (FetchFailed) after the deadline. For work between two programs."""
        if time.monotonic() > self._deadline:
            message = "The files of the source were not listed in time. Select a part with subPath."
            raise SyncError("FetchFailed", message, permanent=False)

    @contextmanager
    def _started(self, command: Sequence[str], stdout: int) -> Iterator["subprocess.Popen[bytes]"]:
        """Start a process group, which is killed at the end of the block and at the deadline."""
        reads = stdout == subprocess.PIPE
        process = subprocess.Popen(
            list(command),
            env=self._environment,
            stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.DEVNULL if reads else subprocess.PIPE,
            start_new_session=True,
        )
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (self.largest, self.largest))
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(max(0.0, self._deadline - time.monotonic()), end)
        timer.daemon = True
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            _kill(process)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
            process.wait()
            if late.is_set():
                message = f"{command[0]} timed out. Check whether the source is slow or too large."
                raise SyncError("FetchFailed", message, permanent=False)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _follow(stream: IO[bytes], command: Sequence[str], scrub: Callable[[str], str]) -> list[str]:
    """The last lines. Progress lines, which overwrite themselves, are logged from time to time."""
    last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
    rest, last_log = b"", time.monotonic()
    while piece := os.read(stream.fileno(), 1 << 16):
        *lines, rest = _LINE_END.split(rest + piece)
        rest = rest[:_LONGEST_LINE]
        for line in lines:
            text = _printable(line)
            if text and "%" not in text:
                last_lines.append(text)
            elif text and time.monotonic() - last_log > _PROGRESS_SECONDS:
                last_log = time.monotonic()
                log("fetching", program=command[0], progress=scrub(text)[:_LONGEST_LINE])
    if text := _printable(rest):
        last_lines.append(text)
    return [scrub(text)[:_LONGEST_LINE] for text in last_lines]


def _printable(line: bytes) -> str:
    text = line.decode(errors="replace").removeprefix("remote:").strip()
    return "".join(c if c.isprintable() else " " for c in text)
