"""Report the progress of the training, with one call for each step.

    import torchrun_progress
    torchrun_progress.report(step=step, total=steps, loss=loss, samples_per_second=rate)

Every rank should call it: each call is a heartbeat for the hang watch. The values of rank 0 go to
the TorchrunJob's status and its metrics. A call takes about a microsecond, never raises and has no
effect outside of a job's pod. At most once a second it writes a small file. Only then values are
converted to numbers, so that a loss on a GPU does not delay every step.

    torchrun_progress.checkpoint(step, path)   # after a complete save, on every rank
    last = torchrun_progress.resume()          # the newest complete one (step, path), or None
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Literal

    from torchrun_runtime.launch.rank._torchrun_stopping import RankCalls

__all__ = [
    *("ResumePoint", "checkpoint", "idle", "report", "resume", "save_requested", "stopping"),
]

_FOLDER = os.environ.get("TORCHRUN_LAUNCH_REPORTS", "")
_PAUSE = 1.0  # seconds between two writes
_next_write = 0.0
_values: dict[str, object] = {}
_stops: RankCalls | Literal[False] | None = None
_KEPT_SAVES = 6  # in the file of a rank, which may be ahead of the others
_LONGEST_PATH = 1024  # characters
_LARGEST_STEP = 2**53
_saving = threading.Lock()  # an asynchronous save may report in a thread


def report(
    step: int | None = None,
    total: int | None = None,
    loss: object = None,
    samples_per_second: object = None,
) -> None:
    """Report the progress of this rank. Values that are None keep their previous value.

    step: steps done so far. total: number of steps of the run. loss: anything that float() accepts,
    such as a tensor with one element. samples_per_second: throughput of the whole job, likewise.
    Values that are not finite are omitted. Writes at most once per second and never raises.
    """
    global _next_write
    if not _FOLDER:
        return
    if step is not None:
        _values["step"] = step
    if total is not None:
        _values["totalSteps"] = total
    if loss is not None:
        _values["loss"] = loss
    if samples_per_second is not None:
        _values["samplesPerSecond"] = samples_per_second
    now = time.monotonic()
    if now >= _next_write:
        if not _next_write:
            atexit.register(_write)  # the last values
        _next_write = now + _PAUSE
        _write()


class ResumePoint(NamedTuple):
    """A checkpoint of this job. path: absolute, or a URL."""

    step: int
    path: str


def checkpoint(step: object, path: object, complete: bool = False) -> None:
    """Report that this rank has saved its part of a checkpoint completely. Never raises.

    step: steps that it contains, an integer from 0. path: of the file or directory, made absolute,
    or a URL; at most 1024 characters. The checkpoint is complete once every rank has reported this
    step; its path is that of rank 0. complete: rank 0 reports that all of it is saved, and no other
    rank has to report it.
    """
    if not _FOLDER:
        return
    try:
        with _saving:
            _add_save(int(step), _absolute(path), complete is True)  # type: ignore[call-overload]
        if _next_write:
            _beat(alive=True)
    except Exception as error:
        with suppress(Exception):
            print(f"torchrun_progress: the checkpoint is not reported: {error}", file=sys.stderr)


def resume() -> ResumePoint | None:
    """Return the checkpoint to resume from, the same one on every rank; None for none.

    It is the newest complete one when the ranks were started, and exists on every node. Never
    raises.
    """
    try:
        with open(os.environ["TORCHRUN_RESUME_FILE"], encoding="utf-8") as file:
            body = json.load(file)
        return ResumePoint(int(body["step"]), str(body["path"]))
    except Exception:
        return None


@contextmanager
def idle() -> Iterator[None]:
    """Exempt this rank from the hang watch, for work of unknown duration.

    Afterwards the watch continues. A process that has not reported any progress is then treated as
    if it had not imported this module.
    """
    if not _FOLDER:
        yield
        return
    with suppress(Exception):
        _beat(alive=False)
    try:
        yield
    finally:
        with suppress(Exception):
            if _next_write:
                _beat(alive=True)
            else:
                os.unlink(_path())


def stopping() -> float | None:
    """Whether all ranks are to stop here: the seconds left to save, or None to go on.

    Call it once a step on every rank, and leave the loop after a save unless it returns None. All
    ranks of the job get the answer at the same call, so that they can save together. Without any
    collective operation: a call takes a few microseconds, and never raises. While every rank calls
    it, SIGTERM does not reach the ranks.
    """
    global _stops
    try:
        if _stops is None:
            _stops = _take_part()
        return _stops.call() if _stops else None
    except Exception:
        return None


def save_requested() -> bool:
    """Whether all ranks are to save and go on, since the last call of stopping().

    It is true on all ranks after the same call, if a user runs `kubectl torchrun checkpoint`.
    """
    return _stops.saves if _stops else False


def _take_part() -> RankCalls | Literal[False]:
    """The calls of this rank; False if its process takes no part in a planned stop."""
    if not _FOLDER or current_process().name != "MainProcess":
        return False
    try:
        import _torchrun_stopping  # type: ignore[import-not-found]  # beside this file

        calls: RankCalls = _torchrun_stopping.RankCalls(_FOLDER, _rank())
        return calls
    except Exception:
        return False


def _absolute(path: object) -> str:
    """The path as the launchers understand it. Raises ValueError, TypeError, OSError."""
    text = os.fsdecode(path)  # type: ignore[arg-type]
    if "://" not in text:
        text = os.path.abspath(text)
    if not text.isprintable():
        raise ValueError(f"its path has characters that cannot be printed: {text!a}")
    if len(text) > _LONGEST_PATH:
        raise ValueError(f"its path has more than {_LONGEST_PATH} characters")
    return text


def _add_save(step: int, path: str, complete: bool) -> None:
    """Add a save to the file of this rank, in which another process may have reported one."""
    if not 0 <= step <= _LARGEST_STEP:
        raise ValueError(f"{step} is no step")
    file_name = os.path.join(_FOLDER, "checkpoint." + _rank())
    saves = []
    with suppress(OSError, ValueError), open(file_name, encoding="utf-8") as file:
        saves = [save for save in json.load(file) if save["step"] != step]
    save = {"step": step, "path": path, "time": time.time(), "world": _world()}
    saves.append({**save, "complete": complete and _rank() == "0"})
    partial = f"{file_name}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(saves[-_KEPT_SAVES:], file)
    os.replace(partial, file_name)


def _world() -> int:
    """The number of ranks; without a launcher, of nodes."""
    return int(os.environ.get("WORLD_SIZE" if os.environ.get("RANK") else "NNODES") or 1)


def _write() -> None:
    with suppress(Exception):
        _beat(alive=True)
        if _values and _rank() == "0":
            _write_values()


def _rank() -> str:
    """The rank, as torchrun or another launcher sets it; without a launcher, the node."""
    return os.environ.get("RANK") or os.environ.get("NODE_RANK") or "0"


def _path() -> str:
    return os.path.join(_FOLDER, "beat." + _rank())


def _beat(alive: bool) -> None:
    """Touch the heartbeat file, which is empty until the first report of this process.

    A child process of multiprocessing (a DataLoader worker) does not change the file of its parent.
    """
    # By name: while a spawned process imports the script, its parent is not known yet.
    is_worker = current_process().name != "MainProcess"
    mode = "ab" if is_worker and not alive else "wb"
    with open(_path(), mode, buffering=0) as file:
        if alive:
            file.write(b".")


def _write_values() -> None:
    numbers: dict[str, float] = {}
    for name, value in _values.items():
        with suppress(Exception):
            number = float(value)  # type: ignore[arg-type]
            if math.isfinite(number):
                whole = name in ("step", "totalSteps")
                numbers[name] = int(number) if whole else number
    path = os.path.join(_FOLDER, "progress")
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump(numbers, file)
    os.replace(partial, path)


if _FOLDER:
    # The launcher now waits for the first report, because compilation may take long.
    with suppress(Exception):
        _beat(alive=False)
