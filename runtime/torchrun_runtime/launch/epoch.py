"""The fence: launchers of a gang that was given up kill its ranks, even where nobody reaches them.

On the state directory, which all gangs of a job share, stand

    epoch       {"attempt": n, "job": uid}: the newest gang that may run
    passed      the same: every gang before this one is dead
    watchers/   an empty file <job>.<attempt>.<index> for each launcher that watches the epoch

A launcher, once through the start gate, makes the epoch its own, watches it from then on, and says
so in watchers/, all before it starts its ranks. It kills them (SIGKILL) and ends with the reason
Fenced as soon as it reads a newer epoch, and when it has read none for FENCE_SECONDS: whoever is
cut off from the storage cannot see that it was given up.

A new gang that is told to fence (workers of older gangs may still run on lost nodes) checks that
each of these said that it watches, makes the epoch its own, and waits WAIT_SECONDS. By then the
others have read the newer epoch or nothing at all, and their ranks are dead.

What this rests on:
- A read that begins after a write has ended sees it: local file systems, NFS (open asks the
  server), CephFS and Lustre do; object stores behind a cache may not.
- Clocks run alike; no two clocks are compared. Time of a suspended machine is counted; that of a
  paused virtual machine may not be: when it goes on, its ranks live until the next read, which is
  POLL_SECONDS off where the storage answers and FENCE_SECONDS where it does not.
- SIGKILL ends a process within seconds. One that the kernel holds in a write to storage dies when
  that write returns, and so may that write come late.
WAIT_SECONDS is therefore FENCE_SECONDS, plus what finding out and killing take, plus a reserve.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from contextlib import suppress
from typing import Callable, NamedTuple

from .errors import LAUNCH_FAILED, LaunchError
from .output import say
from .state import start_thread, within
from .supervise import Verdict

POLL_SECONDS = 2.0
FENCE_SECONDS = 30.0
WAIT_SECONDS = 45.0
_ANSWER_SECONDS = 10.0  # for the storage, before ranks are started
_LOOK_SECONDS = 0.5
# For the main thread to kill the ranks by itself, from when it was to look, and in all.
_TAKE_SECONDS = 3.0
_END_SECONDS = 8.0
# A file is written in one piece and always of this size, so that one over another leaves no rest.
_FILE_BYTES = 256


class Gang(NamedTuple):
    """One gang of one job; later attempts are newer."""

    job: str
    attempt: int


class Worker(NamedTuple):
    """One worker of an older gang of the same job."""

    attempt: int
    completion_index: int


class SupersededError(Exception):
    """Another gang has taken over; the text says which."""


def take_over(
    state: str,
    gang: Gang,
    index: str,
    unfenced: list[Worker],
    end: Callable[[Verdict], None],
    wait: float = WAIT_SECONDS,
) -> Watch | None:
    """Make the epoch this gang's, and wait until those of `unfenced` are dead.

    state: "" where there is none. Returns None, with a line, where there is nothing to watch. `end`
    is for the watch to end the process with. Raises LaunchError: Fenced where a newer gang is there
    or storage does not answer, FenceUnproven where one of `unfenced` never said that it watches.
    """
    if not state:
        if unfenced:
            raise _unproven(unfenced)
        return None
    try:
        alive = within(_ANSWER_SECONDS, lambda: _announce(state, gang, unfenced))
    except SupersededError as error:
        raise LaunchError("Fenced", f"{error}: this one does not start") from error
    except OSError as error:
        if unfenced:
            message = f"the state directory {state} fails, so older workers cannot be fenced"
            raise LaunchError("Fenced", f"{message}: {error}") from error
        say(f"does without the fence, the state directory {state} fails: {error}")
        return None
    watch = Watch(state, gang, end)
    with suppress(OSError):  # unsigned, it is never believed to watch
        within(_ANSWER_SECONDS, lambda: _sign(state, gang, index))
    if alive:
        say(f"workers of older gangs may still run: waiting {wait:.0f} s until they are fenced")
        time.sleep(wait)
    with suppress(OSError):
        within(_ANSWER_SECONDS, lambda: _pass(state, gang, index))
    return watch


class Watch:
    """Reads the epoch again and again; gives a verdict through `look`, and ends who does not look.

    Reads have a thread of their own: storage may hold it for ever. What is judged is when the last
    good read began.
    """

    def __init__(
        self,
        state: str,
        gang: Gang,
        end: Callable[[Verdict], None],
        fence: float = FENCE_SECONDS,
        poll: float = POLL_SECONDS,
        patience: float = _TAKE_SECONDS,
    ) -> None:
        self._state = state
        self._gang = gang
        self._end = end
        self._fence = fence
        self._poll = poll
        self._patience = patience
        self._good = now()
        self._superseded = ""
        self._verdict: Verdict | None = None
        self._taken = threading.Event()
        start_thread(self._read)
        start_thread(self._judge)

    def look(self) -> Verdict | None:
        """For the main thread, about every second."""
        if self._verdict is not None:
            self._taken.set()
        return self._verdict

    def stopping(self) -> None:
        """Nothing changes: a gang that ends may write checkpoints, and must not beside another."""

    def _read(self) -> None:
        while not self._superseded:
            began = now()
            try:
                seen = read(self._state, "epoch")
                if seen is not None:
                    _check(seen, self._gang)
                    if seen != self._gang:
                        _write(self._state, "epoch", self._gang)
                    self._good = began
            except SupersededError as error:
                self._superseded = str(error)
            except OSError:
                pass
            time.sleep(self._poll)

    def _judge(self) -> None:
        while self._verdict is None:
            time.sleep(min(_LOOK_SECONDS, self._poll))
            silence = now() - self._good
            if self._superseded:
                self._verdict = Verdict(LAUNCH_FAILED, "Fenced", self._superseded)
            elif silence > self._fence:
                message = f"no word from the state directory {self._state} for {silence:.0f} s"
                self._verdict = Verdict(LAUNCH_FAILED, "Fenced", message)
        if self._taken.wait(self._patience):
            time.sleep(_END_SECONDS)
        self._end(self._verdict)


def now() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read(state: str, name: str) -> Gang | None:
    """The gang that a file names; None for a file that is empty or no such thing. Raises OSError.

    Past Python's own files, which look at more than they read.
    """
    descriptor = os.open(os.path.join(state, name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    try:
        body = json.loads(text)
        return Gang(str(body["job"]), int(body["attempt"]))
    except (ValueError, KeyError, TypeError):
        return None


def _announce(state: str, gang: Gang, unfenced: list[Worker]) -> list[Worker]:
    """Write the epoch; returns those of `unfenced` that may still live."""
    with suppress(FileNotFoundError):
        seen = read(state, "epoch")
        if seen is not None and seen.job == gang.job:
            _check(seen, gang)
    alive = unfenced
    with suppress(FileNotFoundError):
        passed = read(state, "passed")
        if passed is not None and passed.job == gang.job:
            alive = [worker for worker in unfenced if worker.attempt >= passed.attempt]
    silent = [worker for worker in alive if not os.path.exists(_signature(state, gang.job, worker))]
    if silent:
        raise _unproven(silent)
    _write(state, "epoch", gang)
    written = read(state, "epoch")
    if written is not None:
        _check(written, gang)
    return alive


def _check(seen: Gang, gang: Gang) -> None:
    """Raises SupersededError where `seen` is newer than `gang`, or of another job."""
    if seen.job != gang.job:
        raise SupersededError(f"another job (UID {seen.job}) has taken over the workspace claim")
    if seen.attempt > gang.attempt:
        raise SupersededError(f"attempt {seen.attempt} of this job has taken over")


def _sign(state: str, gang: Gang, index: str) -> None:
    """Say that this launcher watches."""
    folder = os.path.join(state, "watchers")
    with suppress(FileExistsError):
        os.mkdir(folder)
        # The next gang may run as another user; a share of one user's for all has no modes to set.
        with suppress(PermissionError):
            os.chmod(folder, 0o1777)  # noqa: S103
    path = _signature(state, gang.job, Worker(gang.attempt, int(index or 0)))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))


def _signature(state: str, job: str, worker: Worker) -> str:
    return os.path.join(state, "watchers", f"{job}.{worker.attempt}.{worker.completion_index}")


def _pass(state: str, gang: Gang, index: str) -> None:
    """Remember that all before this gang are dead; their signatures are of no use any more."""
    _write(state, "passed", gang)
    if index not in ("", "0"):
        return
    folder = os.path.join(state, "watchers")
    for name in os.listdir(folder):
        job, _, rest = name.partition(".")
        attempt = rest.partition(".")[0]
        if job != gang.job or (attempt.isdigit() and int(attempt) < gang.attempt):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _write(state: str, name: str, gang: Gang) -> None:
    """Replace a file so that a reader finds the old or the new one. Raises OSError."""
    content = json.dumps({"attempt": gang.attempt, "job": gang.job}).ljust(_FILE_BYTES).encode()
    path = os.path.join(state, name)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=state)
    try:
        _fill(descriptor, content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # a full disk shall not fill up with what did not fit
            os.unlink(temporary)
        if not isinstance(error, PermissionError):
            raise
        # The directory is sticky: what another user's gang made can be written, not replaced.
        _fill(os.open(path, os.O_WRONLY | os.O_CLOEXEC), content)


def _fill(descriptor: int, content: bytes) -> None:
    try:
        os.write(descriptor, content)
        with suppress(PermissionError):
            os.fchmod(descriptor, 0o666)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unproven(workers: list[Worker]) -> LaunchError:
    who = ", ".join(f"worker {w.completion_index} of attempt {w.attempt}" for w in workers[:4])
    return LaunchError(
        "FenceUnproven",
        f"{who} may still run on a lost node and never said that it watches for newer gangs",
    )
