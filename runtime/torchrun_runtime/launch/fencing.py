"""Fencing: launchers of a superseded gang kill its ranks, even on unreachable nodes.

All gangs of a job share the state directory. It holds

    epoch       {"attempt": n, "job": uid}: the newest gang that may run
    passed      the same format: every gang before this one is dead
    watchers/   an empty file <job>.<attempt>.<index> for each launcher that watches the epoch

After the start gate and before it starts its ranks, a launcher writes its gang into `epoch`, starts
to watch that file, and registers in watchers/. It kills its ranks (SIGKILL) and ends with the
reason Fenced if it reads a newer epoch, or if it has read nothing for FENCE_SECONDS: a node that is
cut off from the storage cannot see that its gang was superseded.

A new gang may have to fence workers of older gangs that still run on lost machines. It checks that
each of them is registered in watchers/, writes `epoch`, and waits WAIT_SECONDS. By then every older
launcher has read the newer epoch, or nothing, and its ranks are dead.

A launcher whose storage fails at the start runs without the fence. It is not registered, so a gang
that has to fence it does not start. But a Job that resumes creates a pod of the same attempt and
index, for which a registration of the earlier pod would count. If there is one, the new pod does
not run without the fence. If the storage does not say, it does: it cannot be told from a first pod,
and slow storage must not end each gang that it starts.

Assumptions:
- A read that starts after the end of a write sees it. Local file systems, NFS (open asks the
  server), CephFS and Lustre guarantee this; object stores behind a cache may not.
- Clocks run at the same rate; no two clocks are compared. The time of a suspended machine counts.
  That of a paused virtual machine may not: after the pause its ranks run until the next read, at
  most POLL_SECONDS if the storage responds and FENCE_SECONDS if it does not.
- SIGKILL ends a process within seconds. A process that the kernel holds in a write to storage dies
  when that write returns, so that write may come late.
WAIT_SECONDS is therefore FENCE_SECONDS, plus the time to notice and to kill, plus a reserve.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from contextlib import suppress
from typing import Callable, NamedTuple

from .cause import LaunchError
from .contract import LAUNCH_FAILED
from .output import say
from .supervise import StopRequest
from .threads import start_thread, within

POLL_SECONDS = 2.0
FENCE_SECONDS = 30.0
WAIT_SECONDS = 45.0
_PROBE_SECONDS = 10.0
_ANSWER_SECONDS = 10.0  # time limit of the storage before ranks are started
_ENFORCE_SECONDS = 0.5
_SILENT = "it does not respond"  # of a state directory without an error
# Time limits of the main thread: to notice the request, and to kill the ranks.
_NOTICE_SECONDS = 3.0
_END_SECONDS = 8.0
# Files are written at once and always have this size, so that a rewrite leaves no old bytes.
_FILE_BYTES = 256


class GangId(NamedTuple):
    """One gang of one job, by the UID of the job. A higher attempt is newer."""

    job: str
    attempt: int


class OlderWorker(NamedTuple):
    """One worker of an older gang of the same job."""

    attempt: int
    completion_index: int


class TakenOverError(Exception):
    """Another gang has taken over. The message names it."""


def usable(directory: str, seconds: float = _PROBE_SECONDS) -> str:
    """The directory if files can be created in it; else "", with a line in the log."""
    if not directory:
        return ""
    try:
        within(seconds, lambda: _probe(directory))
    except OSError as error:
        say(f"running without the state directory {directory}: {error.strerror or error}")
        return ""
    return directory


def _probe(directory: str) -> None:
    descriptor, path = tempfile.mkstemp(prefix=".probe-", dir=directory)
    os.close(descriptor)
    os.unlink(path)


def take_over(
    state: str,
    gang: GangId,
    index: str,
    unfenced: list[OlderWorker],
    end: Callable[[StopRequest], None],
    wait: float = WAIT_SECONDS,
    *,
    failed_state: str = "",
) -> FencingWatchdog | None:
    """Write the epoch of this gang, and wait until the ranks of `unfenced` are dead.

    state: the state directory, "" for none. failed_state: the one that cannot be used. end: ends
    the process; the watchdog calls it. Returns None, with a line in the log, if there is nothing to
    watch. Raises LaunchError: Fenced if a newer gang exists, the storage fails or does not respond,
    or the registration of an earlier pod would count for this one; FenceUnproven if one of
    `unfenced` never registered as a watcher.
    """
    if failed_state:
        _check_needs_no_fence(failed_state, gang, index, unfenced)
        return None
    if not state:
        if unfenced:
            raise _fence_unproven(unfenced)
        return None
    try:
        unfenced_left = within(_ANSWER_SECONDS, lambda: _claim_epoch(state, gang, unfenced))
    except TakenOverError as error:
        raise LaunchError("Fenced", f"{error} This attempt does not start.") from error
    except OSError as error:
        _check_needs_no_fence(state, gang, index, unfenced, f": {error}")
        say(f"running without the fence, because the state directory {state} failed: {error}")
        return None
    watchdog = FencingWatchdog(state, gang, end)
    with suppress(OSError):  # without registration it counts as a launcher that does not watch
        within(_ANSWER_SECONDS, lambda: _register_watcher(state, gang, index))
    if unfenced_left:
        say(f"waiting {wait:.0f} s until workers of older gangs are fenced")
        time.sleep(wait)
    with suppress(OSError):
        within(_ANSWER_SECONDS, lambda: _record_passed(state, gang, index))
    return watchdog


class FencingWatchdog:
    """Polls the epoch; requests a stop with `check`, or ends the process if `check` is not called.

    Reads run in a separate thread, which the storage may block forever. Another thread compares the
    time with the start of the last successful read.
    """

    def __init__(
        self,
        state: str,
        gang: GangId,
        end: Callable[[StopRequest], None],
        fence: float = FENCE_SECONDS,
        poll: float = POLL_SECONDS,
        notice_seconds: float = _NOTICE_SECONDS,
    ) -> None:
        self._state = state
        self._gang = gang
        self._end = end
        self._fence = fence
        self._poll = poll
        self._notice_seconds = notice_seconds
        self._last_read = now()
        self._superseded = ""
        self._error = _SILENT
        self._stop_request: StopRequest | None = None
        self._noticed = threading.Event()
        start_thread(self._poll_epoch)
        start_thread(self._enforce)

    def check(self) -> StopRequest | None:
        """The main thread calls it about every second."""
        if self._stop_request is not None:
            self._noticed.set()
        return self._stop_request

    def on_stop(self, *, leaving: bool) -> None:
        """Continue to watch: terminating ranks must not write checkpoints during a newer gang."""

    def _poll_epoch(self) -> None:
        while not self._superseded:
            start = now()
            try:
                latest = read(self._state, "epoch")
                if latest is None:
                    self._error = "its file epoch is damaged"
                else:
                    _check_not_superseded(latest, self._gang)
                    if latest != self._gang:
                        _write(self._state, "epoch", self._gang)
                    self._last_read, self._error = start, _SILENT
            except TakenOverError as error:
                self._superseded = str(error)
            except OSError as error:
                self._error = _describe(error)
            time.sleep(self._poll)

    def _enforce(self) -> None:
        while self._stop_request is None:
            time.sleep(min(_ENFORCE_SECONDS, self._poll))
            silence = now() - self._last_read
            if self._superseded:
                self._stop_request = StopRequest(LAUNCH_FAILED, "Fenced", self._superseded)
            elif silence > self._fence:
                message = (
                    f"The state directory {self._state} could not be read for {silence:.0f} s:"
                    f" {self._error}."
                )
                self._stop_request = StopRequest(LAUNCH_FAILED, "Fenced", message)
        if self._noticed.wait(self._notice_seconds):
            time.sleep(_END_SECONDS)
        self._end(self._stop_request)


def _describe(error: OSError) -> str:
    """Why the state directory cannot be read."""
    if isinstance(error, FileNotFoundError):
        return (
            "its file epoch is gone. Do not empty or replace TORCHRUN_STATE_DIR in the command,"
            " which shares it with the launcher"
        )
    return error.strerror or str(error)


def now() -> float:
    """Seconds of a monotonic clock that includes the time while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read(state: str, name: str) -> GangId | None:
    """The gang in a file; None if the content is incomplete. Raises OSError.

    Uses os.open: Python's file objects make more system calls than one read.
    """
    descriptor = os.open(os.path.join(state, name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    try:
        body = json.loads(text)
        return GangId(str(body["job"]), int(body["attempt"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _claim_epoch(state: str, gang: GangId, unfenced: list[OlderWorker]) -> list[OlderWorker]:
    """Write the epoch; returns those of `unfenced` whose ranks may still run."""
    with suppress(FileNotFoundError):
        latest = read(state, "epoch")
        if latest is not None and latest.job == gang.job:
            _check_not_superseded(latest, gang)
    unfenced_left = unfenced
    with suppress(FileNotFoundError):
        passed_gang = read(state, "passed")
        if passed_gang is not None and passed_gang.job == gang.job:
            unfenced_left = [worker for worker in unfenced if worker.attempt >= passed_gang.attempt]
    unregistered = [
        w for w in unfenced_left if not os.path.exists(_watcher_file(state, gang.job, w))
    ]
    if unregistered:
        raise _fence_unproven(unregistered)
    _write(state, "epoch", gang)
    epoch_gang = read(state, "epoch")
    if epoch_gang is not None:
        _check_not_superseded(epoch_gang, gang)
    return unfenced_left


def _check_not_superseded(latest: GangId, gang: GangId) -> None:
    """Raises SupersededError if `latest` is newer than `gang`, or of another job."""
    if latest.job != gang.job:
        raise TakenOverError(f"Another job (UID {latest.job}) has taken over the workspace PVC.")
    if latest.attempt > gang.attempt:
        raise TakenOverError(f"Attempt {latest.attempt} of this job has taken over.")


def _register_watcher(state: str, gang: GangId, index: str) -> None:
    """Record that this launcher watches the epoch."""
    folder = os.path.join(state, "watchers")
    with suppress(FileExistsError):
        os.mkdir(folder)
        # The next gang may run as another user. A share of a single user has no modes.
        with suppress(PermissionError):
            os.chmod(folder, 0o1777)  # noqa: S103
    path = _own_watcher_file(state, gang, index)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))


def _check_needs_no_fence(
    state: str,
    gang: GangId,
    index: str,
    unfenced: list[OlderWorker],
    why: str = "",
) -> None:
    """Raise LaunchError if this pod must not start without the state directory, which failed.

    It has to fence older workers, or an earlier pod may have registered as this one.
    """
    if unfenced:
        message = f"Cannot fence older workers, because the state directory {state} failed{why}."
        raise LaunchError("Fenced", message)
    is_registered = False
    with suppress(OSError):
        is_registered = within(_ANSWER_SECONDS, lambda: _is_registered(state, gang, index))
    if not is_registered:
        return
    raise LaunchError(
        "Fenced",
        f"Cannot watch for newer attempts, because the state directory {state} failed{why}. A newer"
        " attempt would take the registration of an earlier pod for that of this one.",
    )


def _is_registered(state: str, gang: GangId, index: str) -> bool:
    """Whether a pod of the same attempt and index has registered. Raises OSError."""
    try:
        os.stat(_own_watcher_file(state, gang, index))
    except FileNotFoundError:
        return False
    return True


def _own_watcher_file(state: str, gang: GangId, index: str) -> str:
    return _watcher_file(state, gang.job, OlderWorker(gang.attempt, int(index or 0)))


def _watcher_file(state: str, job: str, worker: OlderWorker) -> str:
    return os.path.join(state, "watchers", f"{job}.{worker.attempt}.{worker.completion_index}")


def _record_passed(state: str, gang: GangId, index: str) -> None:
    """Record that all gangs before this one are dead, and remove their watcher files."""
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


def _write(state: str, name: str, gang: GangId) -> None:
    """Replace a file atomically. Raises OSError."""
    content = json.dumps({"attempt": gang.attempt, "job": gang.job}).ljust(_FILE_BYTES).encode()
    path = os.path.join(state, name)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=state)
    try:
        _fill(descriptor, content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # no partial files on a full disk
            os.unlink(temporary)
        if not isinstance(error, PermissionError):
            raise
        # The directory is sticky: a file of another user's gang can be written, not replaced.
        _fill(os.open(path, os.O_WRONLY | os.O_CLOEXEC), content)


def _fill(descriptor: int, content: bytes) -> None:
    try:
        os.write(descriptor, content)
        with suppress(PermissionError):
            os.fchmod(descriptor, 0o666)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fence_unproven(workers: list[OlderWorker]) -> LaunchError:
    first = ", ".join(f"Worker {w.completion_index} of attempt {w.attempt}" for w in workers[:4])
    return LaunchError(
        "FenceUnproven",
        f"{first} may still run on a lost machine. It never confirmed that it watches"
        " for newer gangs.",
    )
