"""A torchrun that waits for the next round with torch imported.

The import of torch takes torchrun 1.3 to 1.7 s of each start, before the ranks import torch
themselves. So once a round trains, the launcher keeps one Python that has imported torchrun. The
next round runs in it, with the arguments, environment, directory and output of that round.

In any doubt the round starts torchrun as the first one does: the process is not ready, it has
ended, the command has another environment, or memory is short.
"""

from __future__ import annotations

import array
import json
import os
import re
import select
import signal
import socket
import time
from contextlib import suppress
from typing import Mapping, Sequence

from . import contract
from .output import say
from .processes import Process, find, forget, hide, send
from .supervise import RESET_SIGNALS, StopRequest
from .watchdogs import read_beats

_DELAY = 60.0  # seconds of a round that reports no steps
# Bytes that must be free for the process, which takes 0.54 GB with torch 2.15 for CUDA.
NEEDED = 2 << 30
# With less than that it ends: at the limit, the kernel might kill a rank, or the whole container
# (memory.oom.group).
SPARED = 1 << 30
_STARTED_SECONDS = 2.0
# They differ from round to round.
_OF_ROUND = frozenset(
    {
        contract.ROUND,
        contract.LAUNCH_REPORTS,
        contract.RESUME_FILE,
        contract.PET_RDZV_ID,
        contract.PET_RDZV_CONF,
        contract.PET_RDZV_ENDPOINT,
        contract.PET_MASTER_PORT,
        contract.MASTER_PORT,
    }
)
_AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standby_agent.py")
_RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_CGROUP = "/sys/fs/cgroup"


class StandbyAgent:
    """The waiting torchrun of this node, if there is one.

    python: the start of a command line of the Python that runs torchrun; empty: there is never one.
    program: the words of the command before the arguments of torchrun.
    """

    def __init__(self, python: Sequence[str], program: Sequence[str]) -> None:
        self._python = list(python)
        self._program = list(program)
        self._process: Process | None = None
        self._channel: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._is_refused = False

    @property
    def is_missing(self) -> bool:
        """Whether `prepare` may start one."""
        return bool(self._python) and not self._is_refused and self._channel is None

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start the process, which imports torchrun. environment: of the present round."""
        if not self.is_missing:
            return
        if available_memory() < NEEDED:
            self._is_refused = True
            return
        own, other = socket.socketpair()
        shared = _shared_by_rounds(environment)
        try:
            pid = os.posix_spawnp(
                self._python[0],
                [*self._python, "-c", _RUN, _AGENT, "3"],
                shared,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, other.fileno(), 3),
                ],
                setpgroup=0,
                setsigmask=(),
                setsigdef=RESET_SIGNALS,
            )
        except OSError:
            self._is_refused = True
            own.close()
            return
        finally:
            other.close()
        hide(pid)
        self._process, self._channel, self._environment = find(pid), own, shared

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], ends: Mapping[int, int]
    ) -> int | None:
        """Run the command in the waiting process; its pid, or None if a new one is needed.

        ends: descriptors of stdout and stderr of the command, by number.
        """
        channel, process = self._channel, self._process
        if channel is None or process is None:
            return None
        words = len(self._program)
        is_same = (
            list(argv[:words]) == self._program
            and _shared_by_rounds(environment) == self._environment
        )
        if not (is_same and self._is_ready()):
            self.close()
            return None
        order = json.dumps(
            {
                "program": self._program[-1],
                "arguments": list(argv[words:]),
                "environment": dict(environment),
                "directory": os.getcwd(),
            }
        ).encode()
        descriptors = array.array("i", [ends.get(1, 1), ends.get(2, 2)])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        try:
            channel.sendmsg([b"%16d" % len(order)], rights)
            channel.sendall(order)
            started = _readable(channel, _STARTED_SECONDS) and channel.recv(1) == b"s"
        except OSError:
            started = False
        if not started:
            self.close()
            return None
        channel.close()
        self._channel = self._process = None
        forget(process.pid)
        return process.pid

    def end_if_memory_is_short(self) -> None:
        """Give back the memory of the waiting process if the ranks need it."""
        if self._channel is not None and available_memory() < SPARED:
            say("memory is short: ending the torchrun that waits for the next round")
            self._is_refused = True
            self.close()

    def close(self) -> None:
        """End the waiting process."""
        channel, process = self._channel, self._process
        self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is not None:
            send([process], signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process.pid, 0)
            forget(process.pid)

    def _is_ready(self) -> bool:
        """Whether the process has imported torchrun and still waits."""
        assert self._channel is not None
        return _readable(self._channel, 0.0) and self._channel.recv(1) == b"r"


class StandbyWatch:
    """A watchdog that prepares the next start once this round trains. It requests no stop.

    folder: of the reports of this round. environment: of its command.
    """

    def __init__(self, standby: StandbyAgent, folder: str, environment: Mapping[str, str]) -> None:
        self._standby = standby
        self._folder = folder
        self._environment = environment
        self._due = time.monotonic() + _DELAY

    def check(self) -> StopRequest | None:
        """Prepare it if it is time. Call it about every second."""
        self._standby.end_if_memory_is_short()
        if self._standby.is_missing and (self._trains() or time.monotonic() >= self._due):
            self._standby.prepare(self._environment)
        return None

    def _trains(self) -> bool:
        """Whether a rank of this node has called torchrun_progress.report."""
        return any(beat.reported for beat in read_beats(self._folder))

    def on_stop(self, *, leaving: bool) -> None:
        """No round follows if the pod ends."""
        if leaving:
            self._standby.close()


def _shared_by_rounds(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that do not differ from round to round."""
    return {name: value for name, value in environment.items() if name not in _OF_ROUND}


def available_memory() -> int:
    """The bytes that this container can still use.

    From cgroup v2 or v1 (https://docs.kernel.org/admin-guide/cgroup-v2.html), else from the
    machine. The kernel gives back inactive pages of files.
    """
    free = [_free_on_machine()]
    for limit, usage, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        most, used = _number(limit), _number(usage)
        if most is not None and used is not None:
            free.append(most - used + _statistic(os.path.dirname(limit), inactive))
    return max(0, min(free))


def _free_on_machine() -> int:
    with suppress(OSError), open("/proc/meminfo") as file:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", file.read(), re.MULTILINE)
        if match:
            return int(match.group(1)) << 10
    return 0


def _number(name: str) -> int | None:
    """A file of the cgroup; None if it has no number, as a limit of `max`."""
    with suppress(OSError, ValueError), open(os.path.join(_CGROUP, name)) as file:
        return int(file.read())
    return None


def _statistic(folder: str, name: str) -> int:
    with suppress(OSError), open(os.path.join(_CGROUP, folder, "memory.stat")) as file:
        for line in file:
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _readable(channel: socket.socket, seconds: float) -> bool:
    return bool(select.select([channel], [], [], seconds)[0])
