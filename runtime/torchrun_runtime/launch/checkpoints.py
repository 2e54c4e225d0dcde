"""Checkpoints on this node: what its ranks have saved, the resume file, and the reports."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Callable, Iterable, NamedTuple, Sequence

from .gang.checkpoints import (
    KEPT_SAVES,
    LARGEST_STEP,
    LONGEST_PATH,
    CheckpointLedger,
    CompleteCheckpoint,
    Saved,
    digest,
    limited,
    to_checkpoints,
)
from .output import timestamp

_REPEAT_SECONDS, _RETRY_SECONDS = 60.0, 10.0  # of a report that was accepted, and refused
_SAVES = "checkpoint."  # files of rank/torchrun_progress.py
_RESUME = "resume.json"


def newest_of_round(folders: Iterable[str]) -> CompleteCheckpoint | None:
    """The newest complete checkpoint of the present round. folders: of all nodes of a job."""
    ledger = CheckpointLedger()
    ledger.note([read_saves(folder) for folder in folders])
    return ledger.newest[0] if ledger.newest else None


class _Claim(NamedTuple):
    """One entry in the file of a rank."""

    step: int
    world: int
    rank: int
    path: str
    time: str
    is_complete: bool


def read_saves(folder: str) -> tuple[Saved, ...]:
    """What the ranks of this node have saved, without unreadable files and invalid entries."""
    claims: list[_Claim] = []
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            rank = name[len(_SAVES) :]
            if name.startswith(_SAVES) and rank.isdecimal():
                claims += _read_claims(os.path.join(folder, name), int(rank))
    saves: dict[tuple[int, int], Saved] = {}
    for claim in sorted(claims, key=lambda claim: claim.rank):
        key = claim.step, claim.world
        saved = saves.get(key, Saved(*key, ()))
        saved = saved._replace(ranks=(*saved.ranks, claim.rank))
        if claim.rank == 0:
            saved = saved._replace(path=claim.path, time=claim.time, is_complete=claim.is_complete)
        saves[key] = saved
    return limited(tuple(saves.values()))


def _read_claims(path: str, rank: int) -> list[_Claim]:
    claims: list[_Claim] = []
    with suppress(OSError, ValueError, RecursionError):
        with open(path, encoding="utf-8") as file:
            body = json.load(file)
        for entry in body[-KEPT_SAVES:] if isinstance(body, list) else ():
            with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
                claims.append(_to_claim(entry, rank))
    return claims


def _to_claim(entry: dict[str, object], rank: int) -> _Claim:
    step, world, path, moment = (entry[name] for name in ("step", "world", "path", "time"))
    is_path = isinstance(path, str) and path.isprintable() and 0 < len(path) <= LONGEST_PATH
    if not isinstance(path, str) or not is_path:
        raise ValueError("a path is expected")
    if not isinstance(step, int) or not isinstance(world, int) or not 0 <= step <= LARGEST_STEP:
        raise ValueError("numbers are expected")
    if not isinstance(moment, (int, float)):
        raise TypeError("a time is expected")
    is_complete = entry.get("complete") is True
    return _Claim(step, world, rank, path, timestamp(moment), is_complete)


def write_resume_file(folder: str, checkpoint: CompleteCheckpoint | None) -> str:
    """The file of the round for its ranks, which exists only if there is a checkpoint."""
    path = os.path.join(folder, _RESUME) if folder else ""
    if path and checkpoint is not None:
        body = {"step": checkpoint.step, "path": checkpoint.path}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(body, file)
    return path


def parse_candidates(text: str) -> tuple[CompleteCheckpoint, ...]:
    """The checkpoints in the annotation of a pod; none if it is not valid."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return to_checkpoints(json.loads(text))
    return ()


def describe(checkpoints: Sequence[CompleteCheckpoint]) -> list[dict[str, object]]:
    """The checkpoints in a report and in the termination message."""
    return [checkpoint._asdict() for checkpoint in checkpoints]


class CheckpointReporter:
    """The report of the newest complete checkpoints to the controller.

    It is due when they change, and once in _REPEAT_SECONDS: the controller may have lost it. read:
    the newest ones, in any thread.
    """

    def __init__(self, read: Callable[[], Sequence[CompleteCheckpoint]]) -> None:
        self._read = read
        self._accepted = ""  # digest of the last ones that the controller has
        self._refused = ""
        self._next_time = 0.0

    @property
    def has_news(self) -> bool:
        """Whether there are checkpoints that no report had, accepted or not."""
        return digest(self._read()) not in ("", self._accepted, self._refused)

    def send(self, send: Callable[[bytes], bool], *, is_last: bool = False) -> None:
        """Send it if it is due. send: returns whether the controller has accepted a report."""
        newest, now = self._read(), time.monotonic()
        name = digest(newest)
        waits = now < self._next_time and not (is_last and name == self._refused)
        if not newest or (waits and name in (self._accepted, self._refused)):
            return
        self._accepted = self._refused = ""
        body = json.dumps({"checkpoints": describe(newest)}, ensure_ascii=False).encode()
        if send(body):
            self._accepted, self._next_time = name, now + _REPEAT_SECONDS
        else:
            self._refused, self._next_time = name, now + _RETRY_SECONDS
