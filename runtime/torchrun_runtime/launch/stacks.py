"""The Python stacks of all threads of every rank and of its children.

Each Python of the command registers faulthandler on a signal (rank/sitecustomize.py), with a
separate file: faulthandler writes in many small pieces, which would mix in a shared log. The signal
is a real-time signal, which programs do not use, so its handler does not replace one of the user.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import NamedTuple

from .contract import JOB_NAME, LAUNCH_REPORTS, NODE_RANK
from .output import say, write_log
from .processes import Process, below, descendants, every, handles, ranks, send, state, variable

STACK_SIGNAL = signal.SIGRTMAX - 1
PREFIX = "stack."
_WAIT_SECONDS = 2.0  # to write stacks; a process in an uninterruptible call writes none
_PAUSE = 0.05
_LONGEST = 64 << 10  # bytes of one process
_MOST = 1 << 20  # bytes altogether
_WHY_NONE = "it is not a Python process, or it is in a call that cannot be interrupted"


class Stack(NamedTuple):
    """The stacks of all threads of a process, as faulthandler writes them; empty without any.

    is_rank: whether no rank is above the process.
    """

    process: Process
    rank: str | None
    is_rank: bool
    text: bytes


def write_stacks(folder: str) -> None:
    """Make every rank of this pod write its stacks, and log them, rank by rank."""
    remaining = _MOST
    for stack in take_stacks(folder, descendants(os.getpid())):
        text = stack.text[:remaining]
        remaining -= len(text)
        who = _name(stack)
        if text:
            say(f"stack of {who}:")
            write_log(text if text.endswith(b"\n") else text + b"\n")
        elif remaining > 0:
            say(f"no stack of {who}, its state is {state(stack.process.pid)}: {_WHY_NONE}")


def take_stacks(folder: str, tree: list[Process]) -> list[Stack]:
    """Make the ranks of a tree and their children write their stacks; all processes without ranks.

    folder: of the reports. Takes up to _WAIT_SECONDS.
    """
    found = ranks(tree)
    selected = sorted(below(found, tree) or tree, key=lambda process: process not in found)
    paths = {process: os.path.join(folder, f"{PREFIX}{process.pid}") for process in selected}
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
    return [
        Stack(
            process,
            variable(process.pid, "RANK"),
            not found or process in found,
            _read(path, before[process]),
        )
        for process, path in paths.items()
    ]


def main() -> int:
    """Print the stacks of the commands of this container as a JSON list."""
    print(json.dumps(snapshot()))
    return 0


def snapshot(job: str = "") -> list[dict[str, object]]:
    """The stacks of the commands that this process can see, as JSON objects.

    job: only those of the job with this name, for runs on one machine.
    """
    return [
        {
            "rank": int(stack.rank) if stack.rank and stack.rank.isdigit() else None,
            "node": variable(stack.process.pid, NODE_RANK),
            "pid": stack.process.pid,
            "name": stack.process.name,
            "isRank": stack.is_rank,
            "stack": stack.text.decode("utf-8", "replace"),
            "state": state(stack.process.pid),
        }
        for folder, tree in commands(job).items()
        for stack in take_stacks(folder, tree)
    ]


def commands(job: str = "") -> dict[str, list[Process]]:
    """The processes of the commands that this process can see, by their folder of reports.

    job: as of `snapshot`.
    """
    by_folder: dict[str, list[Process]] = {}
    for process in every():
        folder = variable(process.pid, LAUNCH_REPORTS)
        if folder and (not job or variable(process.pid, JOB_NAME) == job):
            by_folder.setdefault(folder, []).append(process)
    return by_folder


def _name(stack: Stack) -> str:
    of = f" of rank {stack.rank}" if stack.rank is not None else ""
    return f"{stack.process.name}[{stack.process.pid}]{of}"


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
