"""The complete checkpoints of a job: from its status, reports and the ends of its pods.

The leader of each gang gets them from an annotation, and gives newer ones later times. So the order
of their times is that in which they were saved, and a late report of an older gang replaces none.
They are claims of the job, and decide only over the job.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.meta import Wire
from torchrun_api.kinds.status import Checkpoint, TorchrunJobStatus
from torchrun_controller.reconcile.gang.failures import termination_message
from torchrun_controller.reconcile.model.observed import ObservedGang, decode_json
from torchrun_controller.reconcile.pods.lifecycle import index_of

KEPT = 3
# Least time between two writes of the status for a checkpoint alone.
INTERVAL = timedelta(seconds=10)


class _LastWords(Wire, frozen=True, kw_only=True):
    """The part of a termination message about checkpoints."""

    checkpoints: Annotated[tuple[Checkpoint, ...], Meta(max_length=KEPT)] = ()


def merge(*sources: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the newest of all, at most KEPT, the newest first and one for each path.

    A path that was saved again has lost its older checkpoint.
    """
    by_path: dict[str, Checkpoint] = {}
    for checkpoint in _in_utc(each for source in sources for each in source):
        known = by_path.get(checkpoint.path)
        if known is None or known.time < checkpoint.time:
            by_path[checkpoint.path] = checkpoint
    newest = sorted(by_path.values(), key=lambda each: each.time, reverse=True)
    return tuple(newest[:KEPT])


def find_known(status: TorchrunJobStatus, gang: ObservedGang) -> tuple[Checkpoint, ...]:
    """Return the newest complete checkpoints that anything shows, the newest first."""
    leaders = (pod for pod in (*gang.workers, *gang.stale_pods) if index_of(pod) == 0)
    words = (
        decode_json(message, _LastWords)
        for pod in (*leaders, *gang.former_leaders)
        if (message := termination_message(pod))
    )
    last_words = (checkpoint for each in words if each for checkpoint in each.checkpoints)
    return merge(_in_status(status), gang.checkpoints, last_words)


def record(
    status: TorchrunJobStatus,
    last_status: TorchrunJobStatus,
    gang: ObservedGang,
    now: datetime,
    *,
    is_running: bool,
) -> TorchrunJobStatus:
    """Return the status with those of the gang; while ranks run, at most once per INTERVAL."""
    known = gang.checkpoints
    if is_running and _seconds_left(last_status, now) > 0:
        known = _in_status(last_status)
    last, *earlier = known or (None,)
    return replace(status, last_checkpoint=last, earlier_checkpoints=tuple(filter(None, earlier)))


def next_record(status: TorchrunJobStatus, gang: ObservedGang, now: datetime) -> float | None:
    """Return the seconds until the status needs newer checkpoints; None if it has them."""
    is_current = gang.checkpoints == _in_status(status)
    return None if is_current else _seconds_left(status, now)


def annotate(known: tuple[Checkpoint, ...]) -> JsonObject:
    """Return the annotation for the launcher of node 0; empty without checkpoints.

    Only ASCII: the kubelet quotes the value as Go does, which escapes nothing else then.
    """
    if not known:
        return {}
    bodies = [
        {"step": each.step, "path": each.path, "time": f"{each.time:%Y-%m-%dT%H:%M:%S.%fZ}"}
        for each in known
    ]
    return {names.COMPLETE_CHECKPOINTS: json.dumps(bodies)}


def _in_utc(checkpoints: Iterable[Checkpoint]) -> Iterator[Checkpoint]:
    """Return the checkpoints with times in UTC, without those that have none in UTC."""
    for checkpoint in checkpoints:
        with suppress(OverflowError):  # the first or the last day of all
            yield replace(checkpoint, time=checkpoint.time.astimezone(UTC))


def _in_status(status: TorchrunJobStatus) -> tuple[Checkpoint, ...]:
    last = status.last_checkpoint
    return () if last is None else (last, *status.earlier_checkpoints)


def _seconds_left(status: TorchrunJobStatus, now: datetime) -> float:
    if status.last_checkpoint is None:
        return 0.0
    age = now - status.last_checkpoint.time
    # A time in the future: of another clock.
    return (INTERVAL - age).total_seconds() if timedelta() <= age < INTERVAL else 0.0
