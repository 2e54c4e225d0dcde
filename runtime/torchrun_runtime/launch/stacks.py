"""The Python stacks of all threads of every rank and of its children.

Each Python of the command registers faulthandler on a signal (rank/sitecustomize.py), with a
separate file: faulthandler writes in many small pieces, which would mix in a shared log. The signal
is a real-time signal, which programs do not use, so its handler does not replace one of the user.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from .output import say, write_log
from .processes import Process, descendants, handles, send, state, variable

STACK_SIGNAL = signal.SIGRTMAX - 1
PREFIX = "stack."
_WAIT_SECONDS = 2.0  # to write stacks; a process in an uninterruptible call writes none
_PAUSE = 0.05
_LONGEST = 64 << 10  # bytes of one process
_MOST = 1 << 20  # bytes altogether


def write_stacks(folder: str) -> None:
    """Make every rank of this pod write its stacks, and log them, rank by rank."""
    paths = {process: _path(folder, process) for process in _processes()}
    before = {process: _size(path) for process, path in paths.items()}
    # A file without a handler: the process executes another program, which the signal would kill.
    # A handler without a file: a forked child that has not registered its own file yet.
    registered = [
        process
        for process, path in paths.items()
        if os.path.exists(path) and handles(process, STACK_SIGNAL)
    ]
    send(registered, STACK_SIGNAL)
    _await([paths[process] for process in registered], [before[process] for process in registered])
    remaining = _MOST
    for process, path in paths.items():
        text = _read(path, before[process])[: min(_LONGEST, remaining)]
        remaining -= len(text)
        who = _name(process)
        if text:
            say(f"stack of {who}:")
            write_log(text if text.endswith(b"\n") else text + b"\n")
        elif remaining > 0:
            say(f"no stack of {who}, its state is {state(process.pid)}: {_WHY_NONE}")


_WHY_NONE = "it is not a Python process, or it is in a call that cannot be interrupted"


def _processes() -> list[Process]:
    """Ranks and then their children; without ranks all processes of the command."""
    tree = descendants(os.getpid())
    ranks = [process for process in tree if variable(process.pid, "LOCAL_RANK") is not None]
    selected = ranks or tree
    above = {process.pid for process in selected}
    return sorted(selected, key=lambda process: process.parent in above)


def _name(process: Process) -> str:
    rank = variable(process.pid, "RANK")
    of = f" of rank {rank}" if rank is not None else ""
    return f"{process.name}[{process.pid}]{of}"


def _path(folder: str, process: Process) -> str:
    return os.path.join(folder, f"{PREFIX}{process.pid}")


def _size(path: str) -> int:
    with suppress(OSError):
        return os.path.getsize(path)
    return 0


def _await(paths: list[str], before: list[int]) -> None:
    """Return when every file has grown and none grows any more, or after _WAIT_SECONDS."""
    end = time.monotonic() + _WAIT_SECONDS
    last = before
    while time.monotonic() < end:
        time.sleep(_PAUSE)
        sizes = [_size(path) for path in paths]
        if sizes == last and all(size > size_before for size, size_before in zip(sizes, before)):
            return
        last = sizes


def _read(path: str, offset: int) -> bytes:
    with suppress(OSError), open(path, "rb") as file:
        file.seek(offset)
        return file.read(_LONGEST)
    return b""
