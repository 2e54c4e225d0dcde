"""Runs suites one after the other, and keeps the results of each."""

import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from everything import junit, process, report, state
from everything.result import INTERRUPTED, Result, judge
from everything.suite import Accepted, Suite

JUNIT = "TORCHRUN_TEST_JUNIT"
"""Where pytest writes its JUnit files; see tests/conftest.py."""
LIMIT = 4 * 3600.0  # seconds of one suite
INTERRUPTED_CODE = 130


class Run:
    """`everything`: all suites, of which a run may choose some. `root`: the checkout."""

    def __init__(
        self,
        root: Path,
        everything: Sequence[Suite],
        accepted: Sequence[Accepted],
        limit: float = LIMIT,
    ) -> None:
        self._root, self._folder = root, root / "build" / "all"
        self._everything, self._accepted, self._limit = everything, accepted, limit
        self._state = state.load(self._folder, root)
        self._summary = self._folder / "summary.md"

    def show(self, suites: Sequence[Suite]) -> int:
        """Print what there is."""
        for suite in suites:
            result = self._state.results.get(suite.name)
            verdict = (result.problem or "passed") if result else "not run"
            seconds = self._state.times.get(suite.name)
            took = report.duration(seconds) if seconds else "unknown"
            print(f"{suite.name:24} {suite.about:56} {took:>12}  {verdict}")
        return 0

    def all(self, suites: Sequence[Suite], *, again: bool = False) -> int:
        """Run what has not passed on this commit. Returns the exit code."""
        if self._state.changed:
            _say("the tree has changes that are not committed: results are kept for exactly these")
        try:
            for number, suite in enumerate(suites, start=1):
                self._one(suite, f"[{number}/{len(suites)}] {suite.name}", again)
        except KeyboardInterrupt:
            self._report(suites)
            _say("interrupted; the same command continues")
            return INTERRUPTED_CODE
        self._report(suites)
        results = self._state.results
        return 0 if all(results[suite.name].passed for suite in suites) else 1

    def _one(self, suite: Suite, title: str, again: bool) -> None:
        known = self._state.results.get(suite.name)
        if known and known.passed and not again:
            _say(f"{title}: has passed on this commit")
            return
        folder = self._folder / suite.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        log = folder / "output.log"
        last = self._state.times.get(suite.name)
        took = f", took {report.duration(last)} last time" if last else ""
        _say(f"{title}: starts{took}; output in {log.relative_to(self._root)}")
        began = time.monotonic()
        # Programs of the tests start pytest, whose failures are wanted.
        extra = {JUNIT: str(folder)} if suite.pytest else {}
        try:
            ending = process.run(suite.command, self._root, log, extra, self._limit)
        except KeyboardInterrupt:
            self._keep(suite, time.monotonic() - began, INTERRUPTED)
            raise
        result = self._keep(suite, time.monotonic() - began, ending)
        tests = f", {result.tests} tests, {len(result.skips)} skipped" if suite.pytest else ""
        verdict = "passed" if result.passed else f"NOT PASSED ({result.problem})"
        _say(f"{title}: {verdict} in {report.duration(result.seconds)}{tests}")

    def _keep(self, suite: Suite, seconds: float, ending: str) -> Result:
        folder = self._folder / suite.name
        result = judge(suite, seconds, ending, junit.read(folder), self._accepted)
        if not suite.pytest:
            junit.write(folder, suite.name, seconds, result.problem)
        self._state.add(suite.name, result, complete=ending != INTERRUPTED)
        state.save(self._state, self._folder)
        self._summary.write_text(self._text(self._everything))
        return result

    def _text(self, suites: Sequence[Suite]) -> str:
        lines = list(report.lines(self._state, suites))
        if all(suite.name in self._state.results for suite in self._everything):
            lines += report.unused(self._state, self._accepted)
        return "\n".join(lines) + "\n"

    def _report(self, suites: Sequence[Suite]) -> None:
        print(f"\n{self._text(suites)}", flush=True)
        _say(f"the summary of all suites is in {self._summary.relative_to(self._root)}")


def _say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)
