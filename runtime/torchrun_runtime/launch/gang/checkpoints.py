"""Which checkpoints are complete, and from which one the ranks of a round resume. Pure.

A checkpoint is complete once every rank of its round has saved it, or once rank 0 says so. A path
names one checkpoint: a newer one with the same path has replaced the files of the older one.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timedelta
from typing import Iterable, Mapping, NamedTuple, Sequence

from ..output import TIME_FORMAT

KEPT = 3  # the newest complete ones
# Of each rank: one that is three saves ahead of the others still reports those that are complete.
KEPT_SAVES = KEPT + 3
LONGEST_PATH = 1024  # characters
LARGEST_STEP = 2**53  # the integers that are exact in every JSON reader
_MOST_SAVES = 16  # of a node
_MOST_RANKS = 1024  # of a node


class CompleteCheckpoint(NamedTuple):
    """A complete checkpoint. path: absolute, or a URL. time: as in TIME_FORMAT."""

    step: int
    path: str
    time: str


class Saved(NamedTuple):
    """What ranks of one node have saved of one step.

    world: the number of ranks when they saved it. path, time: those of rank 0, "" if it has not
    saved the step or runs on another node. is_complete: rank 0 says that all of it is saved.
    """

    step: int
    world: int
    ranks: tuple[int, ...]
    path: str = ""
    time: str = ""
    is_complete: bool = False


class SkippedCheckpoint(NamedTuple):
    """A candidate that does not exist on a node."""

    node: int
    checkpoint: CompleteCheckpoint


class CheckpointNews(NamedTuple):
    """What the leader knows. newest: the complete ones, the newest first.

    skipped: at the start of the present round. is_awaited: rank 0 has saved a step, and nodes that
    still run ranks have not reported it yet.
    """

    newest: tuple[CompleteCheckpoint, ...] = ()
    skipped: tuple[SkippedCheckpoint, ...] = ()
    is_awaited: bool = False


class CheckpointLedger:
    """The complete checkpoints of a gang, in the order in which rank 0 has saved them.

    newest: at most KEPT, the newest first. Their times differ, in the same order, whatever the
    clocks of the nodes say.
    """

    def __init__(self) -> None:
        self.newest: tuple[CompleteCheckpoint, ...] = ()
        self._last_time = ""
        # Of the present round: what rank 0 has saved, and the paths of the complete ones.
        self._times: dict[_Save, str] = {}
        self._counted: dict[_Save, str] = {}

    def inherit(self, known: Iterable[CompleteCheckpoint]) -> None:
        """Add the checkpoints of earlier gangs."""
        for checkpoint in known:
            self._put(checkpoint)
            self._last_time = max(self._last_time, checkpoint.time)

    def note(self, nodes: Sequence[tuple[Saved, ...]]) -> None:
        """Count what the ranks of the present round have saved, by node.

        A round begins without saves, which drops what was counted in the one before.
        """
        named = [saved for node in nodes for saved in node if saved.path]
        present = {_Save(saved.step, saved.world) for saved in named}
        self._times = {save: time for save, time in self._times.items() if save in present}
        self._counted = {save: path for save, path in self._counted.items() if save in present}
        for saved in named:
            save = _Save(saved.step, saved.world)
            is_again = saved.is_complete and self._counted.get(save, saved.path) != saved.path
            if is_again or save not in self._times:
                self._last_time = max(saved.time, _after(self._last_time))
                self._times[save] = self._last_time
            is_new = is_again or save not in self._counted
            if is_new and (saved.is_complete or _is_of_all(save, nodes)):
                self._counted[save] = saved.path
                self._put(CompleteCheckpoint(saved.step, saved.path, self._times[save]))

    def is_counted(self, saved: Saved) -> bool:
        """Whether the step of rank 0 has become a complete checkpoint."""
        return _Save(saved.step, saved.world) in self._counted

    def _put(self, new: CompleteCheckpoint) -> None:
        """Add a checkpoint. Of those with one path, only the newest exists."""
        if any(each.path == new.path and each.time > new.time for each in self.newest):
            return
        others = (each for each in self.newest if each.path != new.path)
        by_time = sorted((new, *others), key=lambda each: each.time, reverse=True)
        self.newest = tuple(by_time[:KEPT])


class _Save(NamedTuple):
    """A step that a number of ranks save in one round."""

    step: int
    world: int


def _is_of_all(save: _Save, nodes: Sequence[tuple[Saved, ...]]) -> bool:
    ranks = {
        rank
        for node in nodes
        for saved in node
        if (saved.step, saved.world) == save
        for rank in saved.ranks
    }
    return len({rank for rank in ranks if 0 <= rank < save.world}) == save.world > 0


def _after(time: str) -> str:
    """The next time; the same one if it cannot be read, or is the last."""
    try:
        moment = datetime.strptime(time, TIME_FORMAT) + timedelta(microseconds=1)
    except (ValueError, OverflowError):
        return time
    return moment.strftime(TIME_FORMAT)


def choose(
    candidates: Sequence[CompleteCheckpoint], missing: Mapping[int, Iterable[int]]
) -> tuple[CompleteCheckpoint | None, tuple[SkippedCheckpoint, ...]]:
    """The newest candidate that every node has, and those that were skipped before it.

    missing: for each node the places of the candidates that it does not have.
    """
    skipped: list[SkippedCheckpoint] = []
    for place, checkpoint in enumerate(candidates):
        without = [node for node, places in sorted(missing.items()) if place in places]
        if not without:
            return checkpoint, tuple(skipped)
        skipped += [SkippedCheckpoint(node, checkpoint) for node in without]
    return None, tuple(skipped)


def digest(candidates: Sequence[CompleteCheckpoint]) -> str:
    """The name of a list of candidates in messages; "" for an empty one."""
    if not candidates:
        return ""
    return hashlib.sha256(json.dumps(candidates).encode()).hexdigest()[:16]


def to_checkpoint(body: object) -> CompleteCheckpoint:
    """A checkpoint in a message or an annotation. Raises TypeError, ValueError or KeyError."""
    if not isinstance(body, dict):
        raise TypeError("an object is expected")
    step, path, time = body["step"], body["path"], body["time"]
    if not _is_step(step) or not isinstance(path, str) or not isinstance(time, str):
        raise TypeError("a step, a path and a time are expected")
    if not 0 < len(path) <= LONGEST_PATH:
        raise ValueError("a path is expected")
    return CompleteCheckpoint(step, path, time)


def to_checkpoints(body: object) -> tuple[CompleteCheckpoint, ...]:
    """A list of at most KEPT checkpoints. Raises as `to_checkpoint`."""
    if not isinstance(body, list) or len(body) > KEPT:
        raise TypeError("a short list is expected")
    return tuple(map(to_checkpoint, body))


def to_saves(body: object) -> tuple[Saved, ...]:
    """What a node has saved, in a message. Raises TypeError or ValueError."""
    if not isinstance(body, list) or len(body) > _MOST_SAVES:
        raise TypeError("a short list is expected")
    saves = tuple(Saved(*each) for each in body)
    for saved in saves:
        texts = (saved.path, saved.time)
        if not _is_step(saved.step) or not all(isinstance(text, str) for text in texts):
            raise TypeError("a step, a path and a time are expected")
        if not all(isinstance(number, int) for number in (saved.world, *saved.ranks)):
            raise TypeError("ranks are expected")
    return tuple(
        saved._replace(ranks=tuple(saved.ranks), is_complete=bool(saved.is_complete))
        for saved in saves
    )


def limited(saves: Sequence[Saved]) -> tuple[Saved, ...]:
    """The part of what a node has saved that a message may contain: that of rank 0 comes first."""
    by_rank_0 = [saved for saved in saves if saved.path][-KEPT_SAVES:]
    others = sorted(saved for saved in saves if not saved.path)
    room = _MOST_SAVES - len(by_rank_0)
    kept = (*by_rank_0, *others[-room:])
    return tuple(saved._replace(ranks=saved.ranks[:_MOST_RANKS]) for saved in kept)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_STEP
