"""Several runs as one table: the median and the range of each figure.

Usage: python -m torchrun_bench.spread bench/results/A.json bench/results/B.json ...
"""

import statistics
import sys
from pathlib import Path

import msgspec

from torchrun_bench.report import Row


class _Run(msgspec.Struct):
    """The used fields of a file of results; rows of older files may lack some."""

    rows: list[Row]


def table(runs: list[list[Row]]) -> str:
    """A markdown table of all figures, in the order of their first occurrence."""
    by_what: dict[str, list[Row]] = {}
    for rows in runs:
        for row in rows:
            by_what.setdefault(row.what, []).append(row)
    lines = [
        "| what | runs | controller | other | ratio | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for what, rows in by_what.items():
        unit = f" {rows[0].unit}" if rows[0].unit else ""
        ours = spread([row.controller for row in rows]) + unit
        bares = [row.bare for row in rows if row.bare is not None]
        ratios = [row.ratio for row in rows if row.ratio is not None]
        bare = spread(bares) + unit if bares else ""
        ratio = spread(ratios) if ratios else ""
        target = rows[-1].target
        met = f"{sum(row.met for row in rows)} of {len(rows)}" if target else ""
        lines.append(f"| {what} | {len(rows)} | {ours} | {bare} | {ratio} | {target} | {met} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """The median, and minimum and maximum if they differ."""
    middle, least, most = statistics.median(values), min(values), max(values)
    if _short(least) == _short(most):
        return _short(middle)
    return f"{_short(middle)} ({_short(least)}-{_short(most)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Print the table of the given files."""
    files = [Path(name).read_bytes() for name in sys.argv[1:]]
    print(table([msgspec.json.decode(text, type=_Run).rows for text in files]))


if __name__ == "__main__":
    main()
