"""The log of a call on the client."""

from __future__ import annotations

from typing import Callable

from torchrun_sdk.kubectl import Child, Kubectl
from torchrun_sdk.spec import END_OF_CALL, Lines
from torchrun_sdk.text import log_line

_END = END_OF_CALL.format(call="")
_LAST_LINES = 5.0  # seconds for the last lines to arrive


class JobLog:
    """Lines of all pods of a job, from the plugin, which prefixes each with the node."""

    def __init__(self, kubectl: Kubectl, job: str, line: Callable[[str], None]) -> None:
        self._child = Child(kubectl.plugin("logs", job, "--follow"), line)

    def close(self) -> None:
        """Stop following."""
        self._child.close()

    def wait(self) -> None:
        """Wait for its end, at most _LAST_LINES seconds."""
        self._child.wait(_LAST_LINES)


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
