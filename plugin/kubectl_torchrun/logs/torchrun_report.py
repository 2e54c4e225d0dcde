"""torchrun's reports of a failed command and of its exit barrier, each folded into one line.

After a rank fails, the torchrun agent of each node prints its own traceback and the table of
ChildFailedError: about 40 lines below the traceback of the user's code. A stopped agent prints a
traceback with SignalException. The format is that of
torch/distributed/elastic/multiprocessing/errors/__init__.py in torch 2.0 to 2.15.

After the ranks of a node have ended with 0, its agent waits for the other agents for at most 300 s,
and then prints a traceback of its log and warnings of the store: up to 30 lines, without any effect
on the run (SimpleElasticAgent._exit_barrier in torch 2.15).
"""

import re
from enum import Enum, auto
from typing import NamedTuple

RANK_MARK = re.compile(rb"\[[a-zA-Z_]*(\d+)\]:")  # torchrun's --tee: role and local rank
REPORT_LINES = 200  # lines of the longest report that --tail can fold; 8 ranks need about 100
_MAX_PENDING = 2000
_AGENT = re.compile(rb"[EW]\d{4} .*torch/distributed/elastic/(multiprocessing|agent)/")
_EXIT_BARRIER = re.compile(_AGENT.pattern + rb".*\] Error waiting on exit barrier\.")
_STORE = re.compile(
    rb"\[W\d{4} .*\[c10d\] (waitForInput|recvValue failed|sendBytes failed)"
    rb"|Exception raised from |frame #\d+: |<omitting python frames>$|$"
)
_TRACEBACK = b"Traceback (most recent call last):"
_ELASTIC = b"torch.distributed.elastic.multiprocessing."
_CHILD_FAILED = _ELASTIC + b"errors.ChildFailedError:"
_SIGNALED = re.compile(re.escape(_ELASTIC) + rb"api\.SignalException: .* got signal: (\d+)")
_PASSED_BARRIER = "stopped waiting for the other nodes after the success of its ranks"
_BORDER = re.compile(rb"={10,}")
_ROOT_CAUSE = b"Root Cause (first observed failure):"
_FIELD = re.compile(rb"  (rank|exitcode) *: (-?\d+)")


class StampedLine(NamedTuple):
    """A line of a log without its newline. stamp: its time in RFC 3339; empty if unknown."""

    stamp: bytes
    text: bytes


class _Part(Enum):
    """The part of a report with the last line."""

    OUTSIDE = auto()
    AGENT_LOG = auto()  # messages of the agent, such as `failed (exitcode: 1)`
    TRACEBACK = auto()  # of the agent or of the user
    TABLE = auto()
    STORE_LOG = auto()  # warnings of the agent's store, or of a rank's
    EXIT_BARRIER = auto()


class ReportFolder:
    """Replaces each report in the log of one node by one line.

    A line that may belong to a report is pending until it is clear whether it does.
    """

    def __init__(self) -> None:
        self._pending: list[StampedLine] = []
        self._part = _Part.OUTSIDE
        self._borders = 0

    def feed(self, line: StampedLine) -> list[StampedLine]:
        """Return the lines to print after the next line of the log, in the order of the log."""
        text = line.text.rstrip()
        mark = RANK_MARK.match(text)
        if mark and text[mark.end() :]:  # output of a rank, which torchrun copies meanwhile
            return [line]
        if _EXIT_BARRIER.match(text):
            released = [] if self._part is _Part.STORE_LOG else self.release()
            self._part = _Part.EXIT_BARRIER
            self._pending.append(line)
            return released
        if self._belongs(text):
            self._pending.append(line)
            if self._is_complete(text):
                return self._fold()
            return self.release() if len(self._pending) > _MAX_PENDING else []
        released = self.release()
        if self._starts(text):
            self._pending.append(line)
            return released
        return [*released, line]

    def release(self) -> list[StampedLine]:
        """Return the pending lines at the end of the log: unchanged, if no report is complete."""
        return self._fold() if self._part is _Part.EXIT_BARRIER else self._take()

    def _take(self) -> list[StampedLine]:
        lines, self._pending = self._pending, []
        self._part, self._borders = _Part.OUTSIDE, 0
        return lines

    def _starts(self, text: bytes) -> bool:
        """Whether a report may start here; updates the part."""
        if _AGENT.match(text):
            self._part = _Part.AGENT_LOG
        elif text == _TRACEBACK:
            self._part = _Part.TRACEBACK
        elif text.startswith(b"[W") and _STORE.match(text):
            self._part = _Part.STORE_LOG
        else:
            return False
        return True

    def _belongs(self, text: bytes) -> bool:
        """Whether the line continues the pending lines; updates the part."""
        if self._part is _Part.AGENT_LOG:
            return self._starts(text)
        if self._part is _Part.STORE_LOG:
            return _STORE.match(text) is not None
        if self._part is _Part.EXIT_BARRIER:
            return _AGENT.match(text) is not None
        if self._part is _Part.TRACEBACK:
            if text.startswith(_CHILD_FAILED):
                self._part = _Part.TABLE
                return True
            return text.startswith(b" ") or _SIGNALED.match(text) is not None
        if self._part is _Part.TABLE:
            self._borders += _BORDER.fullmatch(text) is not None
            return self._borders > 0
        return False

    def _is_complete(self, text: bytes) -> bool:
        if self._part is _Part.TABLE:
            return self._borders == 2
        return self._part is _Part.TRACEBACK and _SIGNALED.match(text) is not None

    def _fold(self) -> list[StampedLine]:
        stamp, part = self._pending[-1].stamp, self._part
        report = [line.text for line in self._take()]
        what = _PASSED_BARRIER if part is _Part.EXIT_BARRIER else _describe(report)
        hint = f" ({len(report)} lines folded, --raw shows them)"
        return [StampedLine(stamp, f"torchrun: {what}{hint}".encode())]


def _describe(report: list[bytes]) -> str:
    signaled = _SIGNALED.match(report[-1])
    if signaled:
        return f"SignalException: stopped by signal {int(signaled[1])}"
    titles = [at for at, text in enumerate(report) if text.rstrip() == _ROOT_CAUSE]
    matches = [_FIELD.match(text) for text in report[titles[-1] :]] if titles else []
    fields = {match[1]: int(match[2]) for match in matches if match}
    rank, code = fields.get(b"rank"), fields.get(b"exitcode")
    if rank is None or code is None:
        return "ChildFailedError"
    end = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"ChildFailedError: rank {rank} {end}"
