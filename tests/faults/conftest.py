"""Settings and counts of the fault suite.

Garbage collection is rare, as it would take a sixth of the time of thousands of short runs. The
counts of tests (`record_property("pairs runs", 200)` and "wrong") are summed, printed as JSON and
written to build/faults.json.
"""

import gc
import json
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from faults.campaign import KINDS
from faults.points import POINTS

gc.set_threshold(100_000, 20, 20)
BUILD = Path(__file__).parents[2] / "build"


class Counts:
    """The counts in the process that collects the reports."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for name, value in report.user_properties:
            part, _, what = name.rpartition(" ")
            if what in ("runs", "wrong"):
                (self.runs if what == "runs" else self.wrong)[part] += int(str(value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.runs:
            return
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        parts = {
            part: {"date": date, "runs": runs, "wrong": self.wrong[part]}
            for part, runs in sorted(self.runs.items())
        }
        counts = {
            "scenarios": len(POINTS),
            "points": sum(POINTS.values()),
            "kinds": len(KINDS),
            "seconds": round(time.monotonic() - self._began),
            "parts": parts,
        }
        text = json.dumps(counts, indent=2)
        BUILD.mkdir(exist_ok=True)
        (BUILD / "faults.json").write_text(text + "\n")
        terminalreporter.write_line(text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the counts in the main process, not in the workers of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counts(), "fault-counts")
