"""The tree of processes below the launcher, as /proc shows it (proc(5))."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from typing import NamedTuple

_SHELLS = ("sh", "dash", "bash", "ash", "busybox", "zsh", "ksh")
_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One process. started: clock ticks since boot, which with the pid tells it from all others."""

    pid: int
    parent: int
    name: str
    started: int


def descendants(root: int) -> list[Process]:
    """Living processes below `root`, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in _all():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(root, ()))
    for process in found:  # grows while it is walked
        found.extend(children.get(process.pid, ()))
    return found


def foremost(tree: list[Process]) -> list[Process]:
    """The processes that a signal is meant for: the ranks, or the command itself without ranks.

    A rank is the topmost process that carries LOCAL_RANK, which torchrun sets. Where that is a
    shell, it is what the shell runs: a shell that is signalled dies at once and leaves its
    program running, unsignalled.
    """
    marked = {p.pid for p in tree if variable(p.pid, "LOCAL_RANK") is not None}
    ranks = [process for process in tree if process.pid in marked and process.parent not in marked]
    children: dict[int, list[Process]] = {}
    for process in tree:
        children.setdefault(process.parent, []).append(process)
    return [inner for process in ranks or tree[:1] for inner in _inside(process, children)]


def programs(tree: list[Process]) -> list[Process]:
    """All but the shells that wait for something: a signalled one would leave that alone."""
    parents = {process.parent for process in tree}
    return [p for p in tree if p.name not in _SHELLS or p.pid not in parents]


def _inside(process: Process, children: dict[int, list[Process]]) -> list[Process]:
    if process.name not in _SHELLS or process.pid not in children:
        return [process]
    return [inner for child in children[process.pid] for inner in _inside(child, children)]


def alive(process: Process) -> bool:
    """Whether it still runs; a zombie does not."""
    now = _read(process.pid)
    return now is not None and now.started == process.started


def send(processes: list[Process], number: int) -> None:
    """Signal those that still run."""
    for process in processes:
        if alive(process):
            with suppress(OSError):
                os.kill(process.pid, number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, which pid 1 is anyway (prctl(2))."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def variable(pid: int, name: str) -> str | None:
    """A variable of the environment that the process was started with."""
    prefix = name.encode() + b"="
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            if entry.startswith(prefix):
                return os.fsdecode(entry[len(prefix) :])
    return None


def state(pid: int) -> str:
    """As "S (sleeping)"; "gone" where it is."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("State:"):
                return line.partition(":")[2].strip()
    return "gone"


def _all() -> list[Process]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [process for process in map(_read, pids) if process]


def _read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    # The name stands in brackets and may hold any character, also brackets.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if fields[0] in ("Z", "X"):
        return None
    return Process(pid, int(fields[1]), head.partition("(")[2], int(fields[19]))
