"""A rank of a warm pod: it runs one call after the other, each in a separate process.

torchrun started this process, so the next call needs neither new pods nor a new torchrun, and each
call starts without the imports of the previous one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torchrun_sdk.spec import (
    CALL_FILE,
    END_OF_CALL,
    ENTRY,
    RESULTS,
    Call,
    Exited,
    encode,
    load_call,
)
from torchrun_sdk.worker.call_files import RankFiles, WarmPod, hang_watch_paused, node

_POLL = 0.05
_KILL_SECONDS = 5.0
_END_SECONDS = 60.0  # time limit for Python to end after the function has returned
_COPY_SECONDS = 2.0  # time limit for its last output
_LOG_BYTES = 64 << 20  # of the output of a call that its client gets
# Above the ports of the launchers: 16 for their rounds in turns, and the next one, on which the
# launcher of node 0 listens.
_FIRST_PORT, _PORTS = 17, 16
_STOPPED = 128 + signal.SIGTERM
# Files of cgroup v2 and v1, as mounted in a container.
_MEMORY = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def serve(folder: Path, call: Call, rank: int) -> int:
    """Run calls until none arrives for the idle time; the exit code.

    call: the one that the job was created for. Later gangs do not run it, because the state of its
    clients is unknown: they deliver it again.
    """
    server = _Server(folder, rank)
    signal.signal(signal.SIGTERM, server.stop)
    if not int(os.environ.get("TORCHRUN_ATTEMPT") or 0):
        code = server.carry_out(call, folder / CALL_FILE)
        if code is not None:
            return code
    return server.stay(call.idle)


class _Server:
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._pod = WarmPod(folder)
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped_by = 0

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: exit at once if no call runs, else forward it to the function.

        The process exits after the last output of the function.
        """
        if self._child is None:
            os._exit(_STOPPED)
        self._stopped_by = number

    def stay(self, idle: float) -> int:
        """Wait for calls and run them; the exit code."""
        last = 0
        while True:
            with hang_watch_paused():
                newest = self._next(last, time.monotonic() + idle)
            if newest is None:
                return 0
            last, name = newest
            file = self._pod.path(last, name)
            call = load_call(file.read_text(encoding="utf-8"))
            code = self.carry_out(call, file)
            if code is not None:
                return code
            idle = call.idle

    def _next(self, last: int, until: float) -> tuple[int, str] | None:
        """The next call; None if none arrived in time and the pod closes."""
        while True:
            number, name = self._pod.newest
            if number > last:
                return number, name
            if time.monotonic() >= until and self._pod.try_close():
                return None
            time.sleep(_POLL)

    def carry_out(self, call: Call, file: Path) -> int | None:
        """Run one call; an exit code if it failed and no client has the error."""
        files = RankFiles(self._folder / RESULTS / call.id, self._rank)
        files.run(True)
        files.remove_read()
        try:
            return self._carry_out(call, file, files)
        finally:
            files.run(False)

    def _carry_out(self, call: Call, file: Path, files: RankFiles) -> int | None:
        kills, start = _oom_kills(), time.monotonic()
        entry = self._folder / ENTRY
        self._child = child = subprocess.Popen(
            [sys.executable, str(entry), "call", str(file)],
            env=environment(os.environ, call.number),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        copying = threading.Thread(target=_copy, args=(child, files, call), daemon=True)
        copying.start()
        self._wait(child, files)
        end = time.monotonic()
        self._clear(child)
        copying.join(_COPY_SECONDS)
        self._child = None
        if self._stopped_by:
            os._exit(_STOPPED)
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if not (files.has_outcome or files.is_ended):
            out_of_memory = _oom_kills() > kills
            outcome = Exited(self._rank, node(), time.time(), code, out_of_memory, end - start, end)
            files.write_outcome(encode(outcome))
        is_done = files.wait(call.linger, failed=code != 0)
        return None if is_done or not code else code

    def _wait(self, child: subprocess.Popen[bytes], files: RankFiles) -> None:
        returned_at = 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL)
                break
            if self._stopped_by:
                child.send_signal(self._stopped_by)
                child.wait()  # the launcher knows how long that may take
                break
            if not returned_at and files.has_outcome:
                returned_at = time.monotonic()
            if files.is_ended or (returned_at and time.monotonic() - returned_at > _END_SECONDS):
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_KILL_SECONDS)
                break

    def _clear(self, child: subprocess.Popen[bytes]) -> None:
        """Kill the processes that the function started."""
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def environment(variables: os._Environ[str] | dict[str, str], number: int) -> dict[str, str]:
    """The environment of the function: the ranks of a later call use a separate store and port.

    torchrun's agent keeps the store of the first call, with the keys of its ranks.
    """
    result = dict(variables)
    port = result.get("MASTER_PORT", "")
    if number and port.isdigit():
        result["MASTER_PORT"] = str(int(port) + _FIRST_PORT + number % _PORTS)
        result["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return result


def _copy(child: subprocess.Popen[bytes], files: RankFiles, call: Call) -> None:
    """Copy the output of the function to the pod's log, and to a file for the client."""
    end = END_OF_CALL.format(call=call.id).encode() + b"\n"
    size = 0
    assert child.stdout is not None
    with files.log.open("wb", buffering=0) as log:
        for line in child.stdout:
            last = line.endswith(end)
            if last:  # after output of the function without a newline
                line = line[: -len(end)] and line[: -len(end)] + b"\n"
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            if size + len(line) < _LOG_BYTES:
                size += len(line)
                log.write(line)
            if last:
                break
        log.write(end)
        for line in child.stdout:  # output during the exit of Python
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _oom_kills() -> int:
    """The number of processes of this container that the kernel has killed for memory."""
    for path in _MEMORY:
        with suppress(OSError):
            match = re.search(r"^oom_kill (\d+)$", Path(path).read_text(), re.MULTILINE)
            if match:
                return int(match.group(1))
    return 0
