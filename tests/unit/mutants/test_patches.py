"""The seeded bugs of `make mutants` apply to the current code."""

import ast
from pathlib import Path

import pytest

from mutants.mutant import CHECKOUT, PACKAGES, DoesNotApplyError, Mutant
from mutants.table import MUTANTS
from mutants.targets import copy_packages

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize("name", BY_NAME)
def test_each_patch_still_applies(name: str) -> None:
    mutant = BY_NAME[name]
    ast.parse(mutant.mutated(), mutant.file)
    assert mutant.new != mutant.old
    assert [test for test in mutant.tests if not (CHECKOUT / test).exists()] == []


def test_there_are_enough_patches_with_unique_names() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 30


def test_a_patch_for_changed_code_is_an_error(tmp_path: Path) -> None:
    for old in ("there is no such line", "import "):
        mutant = Mutant("gone", "cache/store.py", old, "x = 2", "none", ())
        with pytest.raises(DoesNotApplyError, match="gone"):
            mutant.plant(tmp_path)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_bugs_and_only_the_copy_gets_them(tmp_path: Path, package: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.package == package)
    copy_packages(tmp_path, [package])
    before = mutant.origin.read_text()
    mutant.plant(tmp_path)
    assert (tmp_path / package / mutant.file).read_text() == mutant.mutated() != before
    assert mutant.origin.read_text() == before
