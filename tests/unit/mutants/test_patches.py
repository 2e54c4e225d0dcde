"""The seeded bugs of `make mutants` are of the code as it is."""

import ast
from pathlib import Path

import pytest

from mutants.mutant import CHECKOUT, DoesNotApplyError, Mutant
from mutants.table import MUTANTS

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize("name", BY_NAME)
def test_each_still_applies(name: str) -> None:
    mutant = BY_NAME[name]
    ast.parse(mutant.mutated(), mutant.file)
    assert mutant.new != mutant.old
    assert [test for test in mutant.tests if not (CHECKOUT / test).exists()] == []


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 30


def test_one_whose_code_has_changed_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant("gone", "code.py", "x = 1", "x = 2", "none", ())
    for text in ("y = 1", "x = 1; x = 1"):
        (tmp_path / "code.py").write_text(text)
        with pytest.raises(DoesNotApplyError, match="gone"):
            mutant.plant(tmp_path)


def test_a_bug_is_planted_in_the_copy_alone(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1")
    Mutant("other", "code.py", "x = 1", "x = 2", "none", ()).plant(tmp_path)
    assert (tmp_path / "code.py").read_text() == "x = 2"
