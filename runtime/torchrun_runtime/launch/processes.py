"""The tree of processes below the launcher, from /proc (proc(5))."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from typing import NamedTuple

_SHELLS = ("sh", "dash", "bash", "ash", "busybox", "zsh", "ksh")
_PR_SET_CHILD_SUBREAPER = 36

_hidden: set[int] = set()


class Process(NamedTuple):
    """One process. started: clock ticks since boot; unique together with the pid."""

    pid: int
    parent: int
    name: str
    started: int


class Running(NamedTuple):
    """All processes and ranks at one time. ranks: also None, while the command runs."""

    pids: frozenset[int] = frozenset()
    ranks: frozenset[int | None] = frozenset()


def hide(pid: int) -> None:
    """Let no function find this child of the launcher, which is no part of the command."""
    _hidden.add(pid)


def forget(pid: int) -> None:
    """Note that a hidden child has ended: the kernel may use its pid again."""
    _hidden.discard(pid)


def descendants(root: int) -> list[Process]:
    """Running processes below `root`, parents before children."""
    children = _children(every())
    tree = [process for process in children.get(root, ()) if process.pid not in _hidden]
    for process in tree:  # grows during the loop
        tree.extend(children.get(process.pid, ()))
    return tree


def find(pid: int) -> Process | None:
    """The process with this pid; None if no thread of it runs any more."""
    return _read(pid)


def foremost(tree: list[Process], number: int) -> list[Process]:
    """The processes that get a signal: the ranks, or the command itself without ranks.

    A rank is the topmost process with LOCAL_RANK, which torchrun sets. For a shell see `_inside`.
    """
    return _all_inside(ranks(tree) or tree[:1], tree, number)


def foremost_orphans(tree: list[Process], number: int) -> list[Process]:
    """The processes that get a signal after the command has ended: the topmost that remain."""
    pids = {process.pid for process in tree}
    return _all_inside([p for p in tree if p.parent not in pids], tree, number)


def ranks(tree: list[Process]) -> list[Process]:
    """The ranks of torchrun; empty if no process has LOCAL_RANK."""
    marked = {p.pid for p in tree if variable(p.pid, "LOCAL_RANK") is not None}
    return [process for process in tree if process.pid in marked and process.parent not in marked]


def below(tops: list[Process], tree: list[Process]) -> list[Process]:
    """These processes of a tree and all below them, in no order."""
    children = _children(tree)
    found = [*tops]
    for process in found:  # grows during the loop
        found.extend(children.get(process.pid, ()))
    return found


def running(root: int) -> Running:
    """What runs below `root`, whose first child is the command."""
    tree = descendants(root)
    numbers: list[int | None] = [None] if tree else []
    for process in ranks(tree) or tree[:1]:
        number = variable(process.pid, "RANK")
        if number and number.isdigit():
            numbers.append(int(number))
    return Running(frozenset(process.pid for process in tree), frozenset(numbers))


def agents(tree: list[Process]) -> list[Process]:
    """The processes that started the ranks: their parents and ancestors, without shells."""
    by_pid = {process.pid: process for process in tree}
    ancestors: dict[int, Process] = {}
    for rank in ranks(tree):
        above = by_pid.get(rank.parent)
        while above is not None and above.pid not in ancestors:
            ancestors[above.pid] = above
            above = by_pid.get(above.parent)
    return [process for process in ancestors.values() if not _is_shell(process)]


def trapping(tree: list[Process], number: int) -> list[Process]:
    """The shells with a trap for the signal."""
    return [p for p in tree if _is_shell(p) and handles(p, number)]


def programs(tree: list[Process]) -> list[Process]:
    """All but shells that wait for a child: if a signal ended the shell, the child would remain."""
    parents = {process.parent for process in tree}
    return [p for p in tree if p.pid not in parents or not _is_shell(p)]


def handles(process: Process, number: int) -> bool:
    """Whether it has a handler for the signal."""
    return _has(process.pid, "SigCgt", number)


def catches(process: Process, number: int) -> bool:
    """Whether it handles or ignores the signal, so that it does not end at once."""
    return handles(process, number) or _has(process.pid, "SigIgn", number)


def _all_inside(tops: list[Process], tree: list[Process], number: int) -> list[Process]:
    """The processes of `tree` to signal in place of these: see `_inside`."""
    children = _children(tree)
    return [inner for process in tops for inner in _inside(process, children, number)]


def _inside(process: Process, children: dict[int, list[Process]], number: int) -> list[Process]:
    """The processes to signal of a shell and its children.

    For a shell without a trap, only its children get the signal: the shell would end at once and
    leave its program running. A shell with a trap gets the signal, and so does its program in the
    foreground, because the trap runs only after that has ended. Its background programs do not: the
    trap handles them, as in a container without a launcher.
    """
    inner = children.get(process.pid, ())
    if not inner or not _is_shell(process):
        return [process]
    matches = []
    if handles(process, number):
        matches = [process]
        inner = [child for child in inner if not _in_background(child)]
    return matches + [deeper for child in inner for deeper in _inside(child, children, number)]


def _is_shell(process: Process) -> bool:
    """Whether a shell runs in the process, also for a script with a #! line.

    The kernel names the process after such a script. Its argv starts with the interpreter
    (execve(2)).
    """
    if process.name in _SHELLS:
        return True
    with suppress(OSError), open(f"/proc/{process.pid}/cmdline", "rb") as file:
        first = os.fsdecode(file.read().split(b"\0")[0])
        return os.path.basename(first).lstrip("-") in _SHELLS
    return False


def _in_background(process: Process) -> bool:
    """Whether a shell started it with `&`, so that it ignores SIGQUIT and SIGINT (POSIX)."""
    return _has(process.pid, "SigIgn", signal.SIGQUIT)


def _children(tree: list[Process]) -> dict[int, list[Process]]:
    children: dict[int, list[Process]] = {}
    for process in tree:
        children.setdefault(process.parent, []).append(process)
    return children


def _has(pid: int, field: str, number: int) -> bool:
    """Whether a signal is in this set of /proc/PID/status."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def alive(process: Process) -> bool:
    """Whether any of its threads still runs; a zombie has none."""
    now = _read(process.pid)
    return now is not None and now.started == process.started


def is_below(pid: int, root: int) -> bool:
    """Whether a process, which may just have ended, is or was a descendant of `root`.

    Nobody knows the parent of one that was reaped. Pid 1 of a container gets signals of Kubernetes
    from outside, so a process with a number was inside.
    """
    if pid == 0:
        return False
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError):
            return root == 1
        if parent == root:
            return True
        pid = parent
    return False


def send(processes: list[Process], number: int) -> None:
    """Send a signal to those that still run."""
    for process in processes:
        if alive(process):
            with suppress(OSError):
                os.kill(process.pid, number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (prctl(2)). As pid 1 it always is."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def variable(pid: int, name: str) -> str | None:
    """A variable of the initial environment of the process."""
    prefix = name.encode() + b"="
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            if entry.startswith(prefix):
                return os.fsdecode(entry[len(prefix) :])
    return None


def state(pid: int) -> str:
    """The state, such as "S (sleeping)"; "gone" without a process."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("State:"):
                return line.partition(":")[2].strip()
    return "gone"


def every() -> list[Process]:
    """All processes that this one can see."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [process for process in map(_read, pids) if process]


def _read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    # The name is in brackets and may contain any character, also brackets.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    # The state is that of the first thread. Other threads may run on, or end later.
    if fields[0] in ("Z", "X") and int(fields[17]) <= 1:
        return None
    return Process(pid, int(fields[1]), head.partition("(")[2], int(fields[19]))
