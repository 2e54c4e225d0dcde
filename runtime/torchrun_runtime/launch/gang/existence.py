"""Whether checkpoints exist on this node, in a thread: storage may block for ever."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Sequence

from ..output import say
from ..threads import begin
from .checkpoints import CompleteCheckpoint

# How long storage may take to tell whether paths exist.
CHECK_SECONDS = 20.0


class PathCheck:
    """Which candidates exist on this node, before one start. Blocked storage delays it a little.

    A path counts as missing only if the storage says so. Otherwise the ranks meet the storage
    themselves: without the checkpoint they would silently train from the beginning.
    """

    def __init__(self, seconds: float = CHECK_SECONDS) -> None:
        self._seconds = seconds
        self._candidates: tuple[CompleteCheckpoint, ...] = ()
        self._until = 0.0
        self._result: Future[tuple[int, ...]] = Future()

    def look(self, candidates: tuple[CompleteCheckpoint, ...]) -> tuple[int, ...] | None:
        """The places of those that do not exist; None while that is not known yet."""
        if candidates != self._candidates:
            self._candidates = candidates
            self._until = time.monotonic() + self._seconds
            self._result = begin(lambda: _find_missing(candidates))
        if not self._result.done():
            if time.monotonic() < self._until:
                return None
            say(
                f"the storage does not tell within {self._seconds:.0f} s whether a checkpoint"
                f" exists, so it counts as existing: {candidates[0].path}"
            )
            return ()
        missing = self._result.result()
        for place in missing:
            step, path, _ = candidates[place]
            say(f"the checkpoint of step {step} does not exist on this node: {path}")
        return missing


def _find_missing(candidates: Sequence[CompleteCheckpoint]) -> tuple[int, ...]:
    return tuple(n for n, checkpoint in enumerate(candidates) if _is_missing(checkpoint.path))


def _is_missing(path: str) -> bool:
    if "://" in path:
        return False
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError) as error:
        say(f"cannot tell whether a checkpoint exists, so it counts as existing: {path}: {error}")
    return False
