"""The log of a call on the client."""

from __future__ import annotations

import math
import threading
import time
from typing import Callable

from torchrun_sdk.cluster.kubectl import PLUGIN_USAGE, Child, Kubectl, reason
from torchrun_sdk.spec import END_OF_CALL, Lines
from torchrun_sdk.text import log_line

_END = END_OF_CALL.format(call="")
_LAST_LINES = 5.0  # seconds for the last lines to arrive
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0  # before the log is requested again
_START_SECONDS = 2.0  # from the start of the plugin to its request
_JOB_ENDED = (0, 1)  # exit codes of the plugin


class JobLog:
    """Lines of all pods of a job, from the plugin, which prefixes each with the node.

    If the plugin fails, for example because the API server was away for long, `note` gets the
    cause, and the plugin is started again.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        job: str,
        line: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._command = kubectl.plugin("logs", job, "--follow")
        self._job = job
        self._line = line
        self._note = note
        self._last_line: float | None = None  # when it arrived
        self._hurried = threading.Event()
        self._closed = threading.Event()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._closed.set()
        self._hurried.set()
        if self._child is not None:
            self._child.close()

    def wait(self) -> None:
        """Wait for its end, at most _LAST_LINES seconds."""
        self._hurried.set()
        self._thread.join(_LAST_LINES)

    def _run(self) -> None:
        delay = _FIRST_DELAY
        is_noted = False
        while True:
            is_last = self._hurried.is_set()
            child = self._child = Child([*self._command, *self._since()], self._take)
            if self._closed.is_set():  # `close` has ended only the program before
                child.close()
                return
            child.wait()
            code, error = child.exit_code(), reason(child.stderr_tail()).rpartition("\n")[2]
            has_ended = code in _JOB_ENDED and not child.has_crashed()  # a crash exits with 1, too
            child.close()
            if self._closed.is_set() or has_ended:
                return
            why = error.removeprefix("Error: ") or f"the plugin exited with code {code}"
            if code == PLUGIN_USAGE:
                self._note(f"{self._job}: there is no log: {why}")
                return
            if child.has_output:
                delay, is_noted = _FIRST_DELAY, False
            if not is_noted:
                self._note(
                    f"{self._job}: the log has stopped and is requested again; lines may repeat:"
                    f" {why}"
                )
                is_noted = True
            if is_last:
                return
            self._hurried.wait(delay)
            if self._closed.is_set():
                return
            delay = min(2 * delay, _LONGEST_DELAY)

    def _since(self) -> list[str]:
        """The flag for the lines after the last one: of the clock that a suspended laptop keeps."""
        if self._last_line is None:
            return []
        age = max(time.time() - self._last_line, 0.0)
        return [f"--since={math.ceil(age + _START_SECONDS)}s"]

    def _take(self, line: str) -> None:
        self._last_line = time.time()
        self._line(line)


class CallLog:
    """Lines of the ranks of one call in warm pods, from the connections into them."""

    def __init__(self, line: Callable[[str], None], *, several: bool) -> None:
        self._line = line
        self._several = several
        self._lines_read: dict[tuple[int, int], int] = {}
        self._complete_ranks: set[tuple[int, int]] = set()

    def take(self, attempt: int, node: str, lines: Lines) -> None:
        """Print new lines of a rank; after a reconnect, lines arrive a second time."""
        rank = (attempt, lines.rank)
        lines_read = self._lines_read.get(rank, 0)
        new = lines.lines[max(0, lines_read - lines.first) :]
        self._lines_read[rank] = max(lines_read, lines.first + len(lines.lines))
        for text in new:
            if text.startswith(_END):
                self._complete_ranks.add(rank)
            else:
                clean_line = log_line(text)
                self._line(f"[{node}] {clean_line}" if self._several else clean_line)

    def complete_count(self, attempt: int) -> int:
        """The number of ranks whose output is complete."""
        return sum(rank[0] == attempt for rank in self._complete_ranks)
