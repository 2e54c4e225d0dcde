"""Each planted bug still applies, and its tests exist."""

import pytest

from mutants.mutant import CHECKOUT, Mutant
from mutants.table import MUTANTS
from mutants.trial import EVERYTHING


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_applies(mutant: Mutant) -> None:
    assert mutant.mutated() != mutant.origin.read_text()
    assert [test for test in mutant.tests if not (CHECKOUT / test).exists()] == []


def test_the_tests_of_survivors_exist() -> None:
    tests = {test for tests in EVERYTHING.values() for test in tests}
    assert [test for test in sorted(tests) if not (CHECKOUT / test).exists()] == []
