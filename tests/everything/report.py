"""The summary for people: a table of the suites, then what failed and what was skipped."""

from collections import Counter
from collections.abc import Iterator, Sequence

from everything.result import Result, matches
from everything.state import State
from everything.suite import Accepted, Suite

FAILURES_SHOWN = 20


def duration(seconds: float) -> str:
    """As people read it: 45 s, 12 min, 1 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def lines(state: State, chosen: Sequence[Suite]) -> Iterator[str]:
    """The summary as Markdown."""
    yield f"commit {state.commit}"
    if state.changed:
        yield f"with changes that are not committed (digest {state.changed})"
    yield "\n| suite | result | time | tests | skipped |\n|---|---|---|---|---|"
    for suite in chosen:
        yield _row(suite, state.results.get(suite.name))
    done = [state.results[suite.name] for suite in chosen if suite.name in state.results]
    passed = sum(result.passed for result in done)
    seconds = duration(sum(result.seconds for result in done))
    yield f"\n{passed} of {len(chosen)} suites passed, {seconds}"
    for suite in chosen:
        if suite.name in state.results:
            yield from _details(suite.name, state.results[suite.name])


def _row(suite: Suite, result: Result | None) -> str:
    if result is None:
        return f"| {suite.name} | not run | | | |"
    verdict = "passed" if result.passed else f"**{result.problem}**"
    tests = f"{result.tests} | {len(result.skips)}" if suite.pytest else " | "
    return f"| {suite.name} | {verdict} | {duration(result.seconds)} | {tests} |"


def _details(suite: str, result: Result) -> Iterator[str]:
    for test in result.failures[:FAILURES_SHOWN]:
        yield f"failed in {suite}: {test}"
    if (more := len(result.failures) - FAILURES_SHOWN) > 0:
        yield f"failed in {suite}: {more} more"
    for skip in result.unlisted:
        yield f"skipped in {suite} without a listed reason: {skip.test}: {skip.reason}"
    for why, count in Counter(skip.why for skip in result.skips if skip.why).items():
        yield f"skipped in {suite}: {count} tests: {why}"


def unused(state: State, accepted: Sequence[Accepted]) -> Iterator[str]:
    """A line for each entry of the table that matches no skip."""
    skips = [(suite, skip) for suite, result in state.results.items() for skip in result.skips]
    for entry in accepted:
        if not any(matches(entry, suite, skip) for suite, skip in skips):
            what = f"{entry.suite}: {entry.test}: {entry.reason}"
            yield f"accepted, but nothing is skipped for it: {what}"
