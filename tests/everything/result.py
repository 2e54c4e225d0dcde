"""The result of a suite, judged from its exit code and its JUnit files."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from everything.junit import Case
from everything.suite import Accepted, Suite

INTERRUPTED = "interrupted"


class Skip(Struct, frozen=True):
    """A skipped test. `why` it is accepted; "" if no reason is listed."""

    test: str
    reason: str
    why: str


class Result(Struct, frozen=True):
    """`problem` says in a few words why the suite has not passed; "" if it has."""

    seconds: float
    problem: str
    tests: int = 0
    failures: tuple[str, ...] = ()
    skips: tuple[Skip, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all of it ran and passed, but for skips with a listed reason."""
        return not self.problem

    @property
    def unlisted(self) -> list[Skip]:
        """Skips without a listed reason."""
        return [skip for skip in self.skips if not skip.why]


def judge(
    suite: Suite, seconds: float, ending: str, cases: Sequence[Case], accepted: Sequence[Accepted]
) -> Result:
    """The result. `ending`: what was wrong with the process itself; "" for exit code 0."""
    failures = tuple(case.test for case in cases if case.failed)
    skips = tuple(
        Skip(case.test, case.reason, why_accepted(suite, case, accepted))
        for case in cases
        if case.skipped
    )
    problems = [ending] if ending else []
    if failures:
        problems.append(f"{len(failures)} failed")
    if unlisted := sum(not skip.why for skip in skips):
        problems.append(f"{unlisted} skipped without a listed reason")
    if suite.pytest and not cases and ending != INTERRUPTED:
        problems.append("no test ran")
    return Result(seconds, ", ".join(problems), len(cases), failures, skips)


def why_accepted(suite: Suite, case: Case, accepted: Sequence[Accepted]) -> str:
    """Why a skip is accepted; "" if no reason is listed."""
    return next((entry.why for entry in accepted if matches(entry, suite.name, case)), "")


def matches(entry: Accepted, suite: str, skip: Case | Skip) -> bool:
    """Whether an entry of the table is of this skip."""
    pairs = ((suite, entry.suite), (skip.test, entry.test), (skip.reason, entry.reason))
    return all(fnmatchcase(text, pattern) for text, pattern in pairs)
