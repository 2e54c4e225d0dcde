"""Settings and counts of the fault suite.

Garbage collection is rare, as it would take a sixth of the time of thousands of short runs. The
counts of tests (`record_property("pairs runs", 200)` and "wrong") are summed and printed.
"""

import gc
import time
from collections import Counter

import pytest

from faults.campaign import KINDS
from faults.points import POINTS

gc.set_threshold(100_000, 20, 20)


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
        terminalreporter.write_line(
            f"{len(POINTS)} scenarios, {sum(POINTS.values())} points, {len(KINDS)} kinds of faults,"
            f" {time.monotonic() - self._began:.0f} s"
        )
        for part, runs in sorted(self.runs.items()):
            terminalreporter.write_line(f"{part}: {runs} runs, {self.wrong[part]} wrong")


def pytest_configure(config: pytest.Config) -> None:
    """Register the counts in the main process, not in the workers of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counts(), "fault-counts")
