"""Figures of a run: ratios for people, JSON for comparisons."""

import json
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec

RESULTS = Path(__file__).resolve().parent.parent / "results"


class Row(msgspec.Struct, frozen=True):
    """One figure of both sides, what the ratio is and what it should be."""

    what: str
    unit: str
    controller: float
    bare: float | None
    ratio: float | None
    target: str
    met: bool


def percentile(values: list[float], percent: int) -> float:
    """The value below which `percent` of the sorted values lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def table(rows: list[Row]) -> str:
    """A markdown table."""
    lines = [
        "| what | unit | controller | bare client | ratio | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bare = "" if row.bare is None else f"{row.bare:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        met = "yes" if row.met else "NO"
        lines.append(
            f"| {row.what} | {row.unit} | {row.controller:.2f} | {bare} | {ratio}"
            f" | {row.target} | {met} |"
        )
    return "\n".join(lines)


def save(rows: list[Row]) -> Path:
    """Keep the figures with the commit and the machine they belong to."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    now = datetime.now(UTC)
    path = RESULTS / f"{now:%Y%m%d-%H%M%S}.json"
    RESULTS.mkdir(exist_ok=True)
    about = {
        "time": now.isoformat(timespec="seconds"),
        "commit": commit,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    path.write_text(json.dumps(about, indent=1) + "\n")
    return path
