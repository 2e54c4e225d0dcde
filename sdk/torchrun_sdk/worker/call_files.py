"""The files with which ranks and the `collect` of clients exchange frames in a pod."""

from __future__ import annotations

import fcntl
import importlib
import os
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO

from torchrun_sdk.spec import BUSY, CALLS, CLOSED, FREE, RESULTS, STATE_FOLDER, Call, dump_call

_STORAGE_SECONDS = 10.0  # limit to write a frame to the PVC; the storage may hang
# Seconds to wait for a client if the outcome also exists elsewhere: an error in the log, a result
# on the PVC.
_LINGER = 15.0
_POLL = 0.05
_ENDING_SECONDS = 10.0
END = "end"  # a client wants the ranks of the call to end


def hang_watch_paused() -> AbstractContextManager[None]:
    """Active while ranks wait for clients, so that the hang watch ignores that time."""
    try:  # the launcher installs it
        progress = importlib.import_module("torchrun_progress")
    except ImportError:
        return nullcontext()
    idle: AbstractContextManager[None] = progress.idle()
    return idle


class RankFiles:
    """The files of one rank in the folder of one call."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.call = folder.name
        self._folder = folder
        self._start_file = folder / f"{rank}.started"
        self._outcome_file = folder / f"{rank}.left"
        self._read_mark = folder / f"{rank}.taken"
        self._running_mark = folder / f"{rank}.running"
        self._end_mark = folder / END
        self.log = folder / f"{rank}.log"
        self._kept_mark = folder / f"{rank}.kept"
        self._stored_mark = folder / f"{rank}.stored"  # the PVC may have files of the rank
        folder.mkdir(parents=True, exist_ok=True)

    def write_start(self, line: str) -> None:
        """Write the Started frame, and remove the frames of an earlier run of this rank."""
        for path in (self._outcome_file, self._read_mark):
            with suppress(FileNotFoundError):
                path.unlink()
        _write(self._start_file, line)

    def write_outcome(self, line: str) -> None:
        """Write the rank's last frame for current and later clients, and copy it to the PVC."""
        _write(self._outcome_file, line)
        state = os.environ.get("TORCHRUN_STATE_DIR")
        if not state:
            return

        def keep() -> None:
            with suppress(OSError):
                folder = Path(state, STATE_FOLDER, self.call)
                self._stored_mark.touch()
                folder.mkdir(parents=True, exist_ok=True)
                if self._start_file.exists():
                    start = self._start_file.read_text(encoding="utf-8")
                    _write(folder / self._start_file.name, start)
                _write(folder / self._outcome_file.name, line)
                self._kept_mark.touch()
                for call in self._read_calls(self._stored_mark):
                    with suppress(OSError):
                        self._remove_kept(folder.parent / call.name)
                        (call / self._stored_mark.name).unlink()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        thread.join(_STORAGE_SECONDS)

    def remove_read(self) -> None:
        """Remove the large files of earlier calls in this pod whose clients have read them.

        The small ones stay, because a pod starts a call again that it does not know.
        """
        for call in self._read_calls(self._outcome_file):
            with suppress(OSError):
                for path in (self.log, self._outcome_file):  # last what `_read_calls` looks for
                    (call / path.name).unlink(missing_ok=True)

    def _read_calls(self, having: Path) -> list[Path]:
        """The folders of earlier calls whose clients have read this rank, with a file as `having`.

        The file is removed with those that it stands for: a pod may run thousands of calls.
        """
        folders = (path.parent for path in self._folder.parent.glob(f"*/{having.name}"))
        return [
            folder
            for folder in folders
            if folder != self._folder and (folder / self._read_mark.name).exists()
        ]

    def _remove_kept(self, folder: Path) -> None:
        """Remove the files of this rank from the PVC, and the folder after those of all ranks.

        Raises OSError.
        """
        for path in (self._start_file, self._outcome_file):
            (folder / path.name).unlink(missing_ok=True)
        with suppress(OSError):  # another rank has files
            folder.rmdir()

    def wait(self, seconds: float, *, failed: bool) -> bool:
        """Wait until a client has read the last frame or ended the call; False after `seconds`."""
        if failed:
            seconds = _LINGER
        elif self._kept_mark.exists():
            seconds = min(seconds, _LINGER)
        until = time.monotonic() + seconds
        with hang_watch_paused():
            while not (self.is_read or self.is_ended):
                if time.monotonic() >= until:
                    return False
                time.sleep(_POLL)
        return True

    def mark_read(self) -> None:
        """Record that a client has read the last frame."""
        self._read_mark.touch()

    @property
    def is_read(self) -> bool:
        """Whether a client has read the last frame."""
        return self._read_mark.exists()

    @property
    def has_outcome(self) -> bool:
        """Whether the rank has written its last frame."""
        return self._outcome_file.exists()

    @property
    def is_ended(self) -> bool:
        """Whether a client wants the call to end."""
        return self._end_mark.exists()

    def run(self, running: bool) -> None:
        """Mark the pod as busy with this rank, or not."""
        if running:
            self._running_mark.touch()
        else:
            with suppress(FileNotFoundError):
                self._running_mark.unlink()


class WarmPod:
    """A pod that waits for further calls: its past calls, and the lock for the next one.

    A client holds the lock while it may deliver the next call. A rank takes the lock before it
    exits, so that no call is delivered to a gang that is terminating.
    """

    def __init__(self, folder: Path) -> None:
        self._calls = folder / CALLS
        self._results = folder / RESULTS
        self._closed = self._calls / "closed"
        self._lock: IO[str] | None = None
        self._calls.mkdir(parents=True, exist_ok=True)

    @property
    def newest(self) -> tuple[int, str]:
        """Number and id of the last call that was started; 0 and "" without one."""
        names = (path.stem.partition("-") for path in self._calls.glob("*-*.json"))
        return max(((int(number), call) for number, _, call in names), default=(0, ""))

    def path(self, number: int, call: str) -> Path:
        """The file of a call that was started."""
        return self._calls / f"{number}-{call}.json"

    def put(self, call: Call) -> None:
        """Start the call: the ranks read its file.

        The files of calls before the last one are removed, as arguments may be large. A rank may be
        about to read that of the last one.
        """
        _, last = self.newest
        _write(self.path(call.number, call.id), dump_call(call))
        for path in self._calls.glob("*-*.json"):
            if path.stem.partition("-")[2] not in (last, call.id):
                with suppress(OSError):
                    path.unlink()

    def take_state(self) -> str:
        """Take the lock and return FREE, until `release`; or return BUSY or CLOSED.

        Waits up to _ENDING_SECONDS for ranks and clients of a finished call, as they take a moment
        to exit. Does not wait for a rank that runs its call.
        """
        until = time.monotonic() + _ENDING_SECONDS
        while True:
            running = list(self._results.glob("*/*.running"))
            if not running and self._lock_call():
                if self._closed.exists():
                    self.release()
                    return CLOSED
                return FREE
            for path in running:
                finished = path.with_suffix(".left").exists() or (path.parent / END).exists()
                if not finished:
                    return BUSY
            if time.monotonic() >= until:
                return BUSY
            if self._closed.exists():
                return CLOSED
            time.sleep(_POLL)

    def try_close(self) -> bool:
        """Close the pod for further calls unless a client holds the lock; whether it is closed."""
        if self._closed.exists():
            return True
        if not self._lock_call():
            return False
        self._closed.touch()
        self.release()
        return True

    def release(self) -> None:
        """Release the lock for the next client."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_call(self) -> bool:
        lock = (self._calls / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        return True


def node() -> str:
    """The host name of this pod."""
    return socket.gethostname()


def _write(path: Path, text: str) -> None:
    """Write a file atomically. Readers of the folder skip the temporary file, which is hidden."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
