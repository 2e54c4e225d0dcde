"""The verdict on one random mutant, from the results of its runs."""

from pathlib import Path

import pytest

from mutants.fork_server import KILLED_BY_TIME
from mutants.marking import Marks
from mutants.sampled import Bench, Judge
from mutants.sites import Site

SITE = Site("package/code.py", 1, 1, "delete", 0, 4, "a()\n", "pass", "a()", in_function=True)
SECONDS = {"quick": 0.1, "slow": 3.0}


class Recording(Bench):
    """Starts nothing; records the tests and the bug of each run."""

    def __init__(self, root: Path) -> None:
        self.mutated, self.sound = root / "mutated", root / "sound"
        for copy in (self.mutated, self.sound):
            (copy / "package").mkdir(parents=True)
            (copy / SITE.file).write_text("a()\n")
        self.runs: list[tuple[str, float, bool]] = []

    def run(self, site: Site, tests: list[str], seconds: float, *, bug: bool) -> None:  # type: ignore[override]
        self.runs.append((" ".join(tests), seconds, bug))


def verdict(bench: Recording, *results: str) -> str:
    """The killer, after runs with these results."""
    trial = Judge(Marks({SITE.file: {1: ("quick", "slow")}}, SECONDS)).judge(SITE, bench)
    next(trial)
    for result in results[:-1]:
        trial.send(result)
    with pytest.raises(StopIteration) as end:
        trial.send(results[-1])
    assert (bench.mutated / SITE.file).read_text() == "a()\n"
    killer: str = end.value.value.killer
    return killer


@pytest.mark.parametrize("second", ["", "slow", KILLED_BY_TIME])
def test_a_run_out_of_time_is_repeated_with_a_longer_limit(tmp_path: Path, second: str) -> None:
    bench = Recording(tmp_path)
    results = [KILLED_BY_TIME, second, *([""] if second == "slow" else [])]
    assert verdict(bench, *results) == second
    (_, short, _), (_, long, _) = bench.runs[:2]
    assert long > short + 60


def test_a_test_that_fails_without_the_bug_kills_nothing(tmp_path: Path) -> None:
    bench = Recording(tmp_path)
    assert verdict(bench, "quick", "quick", "") == ""
    assert [(tests, bug) for tests, _, bug in bench.runs] == [
        ("quick slow", True),
        ("quick", False),
        ("slow", True),
    ]
