"""Figures of a run: tables for people, JSON for comparisons."""

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

RESULTS = Path(__file__).resolve().parent.parent / "results"


class Row(msgspec.Struct, frozen=True):
    """One figure of the controller and of another program, and their ratio."""

    what: str
    unit: str
    controller: float
    bare: float | None
    ratio: float | None
    part: str = ""


def row(what: str, unit: str, ours: float, bare: float | None = None) -> Row:
    """A figure, rounded."""
    digits = 0 if abs(ours) >= 1000 else 3
    rounded = None if bare is None else round(bare, digits)
    return Row(what, unit, round(ours, digits), rounded, ours / bare if bare else None)


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of the sorted values lie."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def spread(values: Sequence[float]) -> str:
    """The median, and minimum and maximum if they differ."""
    middle, least, most = map(_short, (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least}-{most})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *lines)
    )


def table(rows: Sequence[Row]) -> str:
    """The table of these figures."""
    lines = [
        [
            each.what,
            each.unit,
            f"{each.controller:g}",
            "" if each.bare is None else f"{each.bare:g}",
            "" if each.ratio is None else f"{each.ratio:.2f}",
        ]
        for each in rows
    ]
    return markdown(["what", "unit", "controller", "other", "ratio"], lines)


def machine() -> str:
    """The machine of the figures: processor, cores, memory."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else platform.machine()}, {cores} cores, {gib:.0f} GiB"


def commit() -> str:
    """The short name of the checked out commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
