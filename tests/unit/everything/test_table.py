"""Each target and each file with tests is in a suite."""

import re
import shlex

import pytest

from everything.__main__ import choose, options
from everything.suite import Suite
from everything.table import ACCEPTED, NO_SUITE, suites
from everything.targets import ROOT, PytestCall, dry_run, pytest_calls, targets_with_tests

TESTS = ROOT / "tests"
FILES = sorted(TESTS.glob("**/test_*.py"))
LONG = re.compile(r"\bmark\.long\b")


@pytest.fixture(scope="module")
def everything() -> tuple[Suite, ...]:
    """With the versions that `make all` passes."""
    command = next(line for line in dry_run(["all"]).splitlines() if "-m everything" in line)
    chosen = options(shlex.split(command.partition("-m everything")[2]))
    assert chosen.pythons
    assert chosen.releases
    return suites(chosen.pythons, chosen.releases)


@pytest.fixture(scope="module")
def calls(everything: tuple[Suite, ...]) -> dict[str, list[PytestCall]]:
    return {suite.name: list(pytest_calls(suite)) for suite in everything}


def test_each_target_that_runs_tests_is_in_a_suite(everything: tuple[Suite, ...]) -> None:
    targets = targets_with_tests((ROOT / "Makefile").read_text())
    ours = {re.sub(r"-[\d.]+$", "-%", suite.target) for suite in everything}
    assert targets - ours == NO_SUITE.keys()


def test_each_file_is_reached(calls: dict[str, list[PytestCall]]) -> None:
    """With --long, where it has long tests."""
    every = [call for name, each in calls.items() if name != "unit-long" for call in each]
    unreached = []
    for file in FILES:
        reaching = [call for call in every if call.reaches(file)]
        # The long ones of tests/unit have a suite of their own.
        needs_long = LONG.search(file.read_text()) and not file.is_relative_to(TESTS / "unit")
        if not reaching or (needs_long and not any(call.long for call in reaching)):
            unreached.append(str(file))
    assert FILES
    assert unreached == []


def test_the_long_unit_tests_are_reached(calls: dict[str, list[PytestCall]]) -> None:
    assert calls["unit-long"] == [PytestCall(("tests/unit",), long=True)]


def test_the_suites_that_run_pytest_are_marked(
    everything: tuple[Suite, ...], calls: dict[str, list[PytestCall]]
) -> None:
    assert {suite.name for suite in everything if suite.pytest} == {n for n in calls if calls[n]}


def test_names_are_unique(everything: tuple[Suite, ...]) -> None:
    assert len({suite.name for suite in everything}) == len(everything)


def test_each_accepted_skip_says_why() -> None:
    assert all(entry.why and entry.reason != "*" for entry in ACCEPTED)
    assert len(set(ACCEPTED)) == len(ACCEPTED)


def test_suites_are_chosen_by_name_and_pattern(everything: tuple[Suite, ...]) -> None:
    chosen = choose(everything, ["matrix-kubernetes-*", "unit"])
    assert {suite.target.rstrip("0123456789.") for suite in chosen} == {
        "unit",
        "matrix-kubernetes-",
    }
    assert choose(everything, None) == list(everything)
    with pytest.raises(SystemExit, match="no suite is called fautls"):
        choose(everything, ["unit", "fautls"])


MAKEFILE = """
A ?= b
plain: needed ## Text
\techo hello
tests: $(VENV)/.ready ## Text
\t$(BIN)/pytest tests
split: programs
\tdocker \\
\t  $(BIN)/pytest tests
version-%:
\tpython -m soak
both: tests other
\techo torchrun_bench.page
"""


def test_targets_with_tests_by_their_recipe() -> None:
    found = targets_with_tests(MAKEFILE)
    assert found == {"tests", "split", "version-%"}
