"""Report the progress of the training, with one call for each step.

    import torchrun_progress
    torchrun_progress.report(step=step, total=steps, loss=loss, samples_per_second=rate)

Every rank should call it: each call is a heartbeat for the hang watch. The values of rank 0 go to
the TorchrunJob's status and its metrics. A call takes about a microsecond, never raises and has no
effect outside of a job's pod. At most once a second it writes a small file. Only then values are
converted to numbers, so that a loss on a GPU does not delay every step.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Literal

    from torchrun_runtime.launch.rank._torchrun_stopping import RankCalls

__all__ = ["idle", "report", "save_requested", "stopping"]

_FOLDER = os.environ.get("TORCHRUN_LAUNCH_REPORTS", "")
_PAUSE = 1.0  # seconds between two writes
_next_write = 0.0
_values: dict[str, object] = {}
_stops: RankCalls | Literal[False] | None = None


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
