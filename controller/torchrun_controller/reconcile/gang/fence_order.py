"""The order to fence, in an annotation of the pods whose launchers read it, and its times."""

from collections.abc import Iterable
from datetime import UTC, datetime

from torchrun_api.status import UnfencedWorker


def fence_annotation(workers: tuple[UnfencedWorker, ...], now: datetime) -> str:
    """Return the annotation for the launchers: the time, and the workers that are to be fenced.

    Ranges of indexes keep it below 32 KiB for any workers of one attempt.
    """
    indexes: dict[int, set[int]] = {}
    for worker in workers:
        assert worker.attempt is not None, "launchers cannot fence an earlier job"
        indexes.setdefault(worker.attempt, set()).add(worker.index)
    attempts = (f"{attempt}:{_format_ranges(indexes[attempt])}" for attempt in sorted(indexes))
    return " ".join([format_time(now), *attempts])


def has_worker(order: str, worker: UnfencedWorker) -> bool:
    """Whether the annotation orders to fence the worker."""
    for word in order.split()[1:]:
        attempt, _, ranges = word.partition(":")
        if attempt == str(worker.attempt):
            return any(_covers(each, worker.index) for each in ranges.split(","))
    return False


def _covers(text: str, index: int) -> bool:
    first, _, last = text.partition("-")
    ends = first, last or first
    return all(end.isdecimal() for end in ends) and int(ends[0]) <= index <= int(ends[1])


def _format_ranges(indexes: Iterable[int]) -> str:
    """Return the indexes as 0-3,7."""
    ranges: list[tuple[int, int]] = []
    for index in sorted(indexes):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = ranges[-1][0], index
        else:
            ranges.append((index, index))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def format_time(time: datetime) -> str:
    """Return the time as in annotations."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def parse_time(text: str) -> datetime | None:
    """Return the time of an annotation, None if it is not a time."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
