"""Figures of a run: tables for people, JSON for comparisons."""

import math
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
    """One figure of the controller and of another program, with the ratio and its target."""

    what: str
    unit: str
    controller: float
    bare: float | None
    ratio: float | None
    target: str
    met: bool
    part: str = ""


def row(
    what: str,
    unit: str,
    ours: float,
    bare: float | None = None,
    *,
    ratio: tuple[str, float] | None = None,
    of: float | None = None,
    most: float | None = None,
    least: float | None = None,
) -> Row:
    """A figure with at most one target: `ratio` ("<=" or ">=", bound), or `most`, or `least`.

    `of` is the ratio, if it is not that of the two figures. A smoke run (see `is_smoke`) has no
    targets, because its sizes are too small.
    """
    of = of if of is not None or not bare else ours / bare
    target, met = "", True
    if is_smoke():
        pass
    elif ratio is not None and of is not None:
        sign, bound = ratio
        target, met = f"{sign} {bound:g} x", of <= bound if sign == "<=" else of >= bound
    elif most is not None:
        target, met = f"<= {most:g} {unit}", ours <= most
    elif least is not None:
        target, met = f">= {least:g} {unit}", ours >= least
    digits = 0 if abs(ours) >= 1000 else 3
    rounded = None if bare is None else round(bare, digits)
    return Row(what, unit, round(ours, digits), rounded, of, target, met)


def is_smoke() -> bool:
    """Whether this run only checks that the bench works, by `--quick`."""
    return os.environ.get("TORCHRUN_BENCH_QUICK") == "1"


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of the sorted values lie."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent k of cost = c * size^k, fitted by least squares of the logarithms."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(max(cost, 1e-9)) for cost in costs]
    ).slope


def table(rows: Sequence[Row]) -> str:
    """A markdown table."""
    lines = [
        "| what | unit | controller | other | ratio | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        bare = "" if each.bare is None else f"{each.bare:g}"
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        met = "" if not each.target else "yes" if each.met else "NO"
        lines.append(
            f"| {each.what} | {each.unit} | {each.controller:g} | {bare} | {ratio}"
            f" | {each.target} | {met} |"
        )
    return "\n".join(lines)


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
