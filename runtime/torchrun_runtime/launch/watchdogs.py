"""What ends a command that hangs, and what notices that the kernel kills a rank for memory.

Activity is a call of torchrun_progress.report in any rank, or output of the command. The watch
starts with the first report. If the command never imports torchrun_progress, it starts with the
first output, and only on the node of rank 0: other nodes are often silent for good reason. In a
later round of the same pods it starts without a sign, in twice the time in which the round before
has shown one: the round may wait for a lock that a killed rank has left. A node whose ranks have
ended waits in torchrun for those of other nodes. It does not hang.

A rank that the kernel kills at the memory limit reports nothing, and the kubelet reports OOMKilled
only for pid 1, which is the launcher.
"""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress
from typing import Callable, NamedTuple

from .contract import HUNG, NODE_RANK
from .output import say
from .processes import descendants, ranks, variable
from .stacks import write_stacks
from .supervise import StopRequest

# Seconds between the stacks and the end. Other nodes write their stacks meanwhile, and ranks that
# were only slow may continue.
LAST_CHANCE = 5.0
BEAT = "beat."
# Files of cgroup v2 and v1, as mounted in a container.
_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Beat(NamedTuple):
    """A rank's heartbeat file; `reported` once report() was called, but not within idle()."""

    rank: str
    time_ns: int
    reported: bool


class HangWatchdog:
    """Requests a stop after `seconds` without activity. Call `check` periodically.

    folder: of the heartbeats. chunks: a number that grows whenever the command writes. begun_after:
    seconds from the start of the round before to its first sign, None without one. is_debugged:
    whether someone debugs a rank on any node. The watch pauses meanwhile.
    """

    def __init__(
        self,
        seconds: float,
        folder: str,
        chunks: Callable[[], int],
        begun_after: float | None = None,
        is_debugged: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_debugged = is_debugged
        self._is_paused = False
        self.begun_after: float | None = None
        self._due = math.inf if begun_after is None else 2 * begun_after
        self._start = time.monotonic()
        self._seconds = seconds
        self._folder = folder
        self._chunks = chunks
        self._activity: tuple[list[Beat], int] = ([], 0)
        self._last_activity = self._watch_start = time.monotonic()
        self._stacks_at: float | None = None
        self._has_rank_0: bool | None = None
        self._had_ranks = False

    def check(self) -> StopRequest | None:
        """Request a stop if the node was inactive for too long. Takes up to 2 s to write stacks."""
        now = time.monotonic()
        beats = read_beats(self._folder)
        # Each beat, not the newest: the clock of the node may be set back.
        activity = (beats, self._chunks())
        if activity != self._activity:
            self._activity, self._last_activity = activity, now
        has_begun = self._has_begun(beats)
        if has_begun and self.begun_after is None:
            self.begun_after = now - self._start
        is_due = has_begun or now - self._start >= self._due
        self._note_debugger()
        if not is_due or self._is_paused or self._has_finished(now):
            self._watch_start = now
        silence = now - max(self._last_activity, self._watch_start)
        if silence < self._seconds:
            if self._stacks_at is not None and not self._is_paused:
                say("the ranks continue; this is not a hang")
            self._stacks_at = None
            return None
        if self._stacks_at is None:
            say(f"{self._describe(silence, beats)}; the stacks of the ranks follow")
            self._write_stacks()
            return None
        if now - self._stacks_at < min(LAST_CHANCE, self._seconds):
            return None
        silent = self._describe(silence, beats)
        message = (
            f"{silent[0].upper()}{silent[1:]}. The log of each node has the stacks of its ranks."
        )
        return StopRequest(HUNG, "Hung", message)

    def on_stop(self, *, leaving: bool) -> None:
        """Write the stacks if this node is silent, because another node may have found the hang."""
        silence = time.monotonic() - self._last_activity
        if self._stacks_at is None and silence >= self._seconds / 2:
            say(f"stopping after {silence:.0f} s without activity; the stacks of the ranks follow")
            self._write_stacks()

    def _note_debugger(self) -> None:
        is_debugged = self._is_debugged()
        if is_debugged != self._is_paused:
            self._is_paused = is_debugged
            say(f"a debugger is {'attached' if is_debugged else 'gone'}: the hang watch"
                f" {'pauses' if is_debugged else 'goes on'}")  # fmt: skip

    def _write_stacks(self) -> None:
        write_stacks(self._folder)
        self._stacks_at = time.monotonic()

    def _has_begun(self, beats: list[Beat]) -> bool:
        if beats:
            return any(beat.reported for beat in beats)
        return self._chunks() > 0 and self._is_beside_rank_0()

    def _has_finished(self, now: float) -> bool:
        """Whether ranks of torchrun ran on this node, and none does any more.

        Reads /proc, so only while no rank was seen, and after a silence.
        """
        is_silent = now - self._last_activity >= self._seconds
        if self._had_ranks and not is_silent:
            return False
        has_ranks = bool(ranks(descendants(os.getpid())))
        self._had_ranks = self._had_ranks or has_ranks
        return self._had_ranks and not has_ranks

    def _is_beside_rank_0(self) -> bool:
        if self._has_rank_0 is None:
            numbers = {variable(process.pid, "RANK") for process in descendants(os.getpid())}
            numbers.discard(None)
            if not numbers:
                return os.environ.get(NODE_RANK, "0") == "0"
            self._has_rank_0 = "0" in numbers
        return self._has_rank_0

    def _describe(self, silence: float, beats: list[Beat]) -> str:
        limit = f"hangTimeoutSeconds {self._seconds:.0f}"
        text = f"no progress report and no output for {silence:.0f} s ({limit})"
        reporting = [beat for beat in beats if beat.reported]
        if len(reporting) > 1:
            first = min(reporting, key=lambda beat: beat.time_ns)
            text += f". Rank {first.rank} was the first without progress reports"
        return text


def read_beats(folder: str) -> list[Beat]:
    """Heartbeats of the ranks of this node that import torchrun_progress, sorted by rank."""
    beats = []
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.startswith(BEAT):
                with suppress(OSError):
                    status = os.stat(os.path.join(folder, name))
                    rank = name[len(BEAT) :]
                    beats.append(Beat(rank, status.st_mtime_ns, status.st_size > 0))
    return beats


def oom_kills(files: tuple[str, ...] = _FILES) -> int:
    """Number of processes that the kernel has killed for memory; 0 if unknown."""
    for path in files:
        try:
            with open(path) as file:
                match = _KILLS.search(file.read())
        except OSError:
            continue
        if match:
            return int(match.group(1))
    return 0


class OomWatchdog:
    """Notes when the kernel kills a process of this container for memory. It requests no stop."""

    def __init__(self, count: Callable[[], int] = oom_kills) -> None:
        self._count = count
        self._kills = count()
        self._newest: float | None = None

    def check(self) -> StopRequest | None:
        """Note the time of new kills. Call it about every second."""
        kills = self._count()
        if kills > self._kills:
            self._kills, self._newest = kills, time.monotonic()
        return None

    def on_stop(self, *, leaving: bool) -> None:
        """Note kills before the stop."""
        self.check()

    def has_killed(self, seconds: float = float("inf")) -> bool:
        """Whether there was a kill within the last seconds."""
        self.check()
        return self._newest is not None and time.monotonic() - self._newest < seconds
