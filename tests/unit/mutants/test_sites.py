"""Where random mutants are planted, and which tests try them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import marking
from mutants.marking import IMPORTING, Marks
from mutants.sampled import digest_of, equivalents, names_module, universe
from mutants.sites import Site, sites
from mutants.targets import TARGETS, copy_packages, origin

CODE = '''\
"""A docstring, 1 + 1."""
from __future__ import annotations
LIMIT: int = 3
SECONDS = 2.5


def judge(a: list[int], b: bool = True) -> int | None:
    """Another, not a > b."""
    log("left", a and b); say("left", a or b)
    assert a or b, "grüße"
    if a and not b or len(a) >= LIMIT:
        a.clear()
        raise ValueError("no " + "more")
    for one in a:
        if one is None:
            continue
        a[0] += 1
    return LIMIT - 1 if b not in (0, 1) else None


class Interface(Protocol):
    def judge(self, a: int = 7) -> None:
        """Runs nowhere."""
'''


@pytest.fixture
def found(tmp_path: Path) -> list[Site]:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return sites(path, "package/code.py")


def test_each_operator_has_sites_but_no_time_limit(found: list[Site]) -> None:
    changes = {(site.line, site.kind, " ".join(site.before.split()), site.after) for site in found}
    assert changes == {
        (3, "constant", "3", "4"),
        (7, "constant", "True", "False"),
        (11, "delete", 'if a and not b or len(a) >= LIMIT: a.clear() raise ValueError("no " + "more")', "pass"),
        (11, "and/or", "and", "or"),
        (11, "and/or", "or", "and"),
        (11, "not", "not", ""),
        (11, "comparison", ">=", ">"),
        (11, "comparison", ">=", "<"),
        (12, "delete", "a.clear()", "pass"),
        (13, "delete", 'raise ValueError("no " + "more")', "pass"),
        (15, "delete", "if one is None: continue", "pass"),
        (15, "comparison", "is", "is not"),
        (16, "delete", "continue", "pass"),
        (17, "delete", "a[0] += 1", "pass"),
        (17, "constant", "0", "1"),
        (17, "constant", "1", "2"),
        (18, "return None", "return LIMIT - 1 if b not in (0, 1) else None", "return None"),
        (18, "+/-", "-", "+"),
        (18, "comparison", "not in", "in"),
        (18, "constant", "1", "2"),
        (18, "constant", "0", "1"),
    }  # fmt: skip


def test_each_mutant_changes_one_place_and_compiles(found: list[Site]) -> None:
    for site in found:
        assert CODE[site.start : site.end] == site.before
        mutated = site.mutate(CODE)
        assert mutated != CODE
        compile(mutated, site.file, "exec")
        assert CODE.splitlines()[site.line - 1].strip() == site.source
        assert site.statement <= site.line


def test_there_are_enough_sites() -> None:
    found = universe()
    assert len(found) > 1500
    assert len({(site.file, site.start, site.end, site.after) for site in found}) == len(found)
    assert all(target.test_files() for target in TARGETS)
    assert len(digest_of(origin(found[0].file))) == 16


def test_equivalent_mutants_have_files_and_reasons() -> None:
    for (file, source, before, after), reason in equivalents().items():
        assert origin(file).exists()
        assert before != after
        assert source
        assert len(reason) > 20


def test_marks_record_which_test_runs_a_line_in_any_process(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "code.py").write_text(
        "import os\nX = 1\ndef f(a):\n    if a:\n        os._exit(0)\n    return X\n"
    )
    marking.instrument(tmp_path, ["package/code.py"])
    words = [sys.executable, "-c", "import package.code as c; c.f(0); c.f(1)"]
    (tmp_path / "current").write_text("tests/x.py::test_y")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(words, env=environment, check=False).returncode == 0
    (tmp_path / "seconds.json").write_text('{"tests/x.py::test_y": 0.5}')
    marks = marking.read(tmp_path)
    assert marks.covering("package/code.py", 5) == ["tests/x.py::test_y"]
    assert marks.covering("package/code.py", 7) == []


def test_a_line_that_runs_at_import_belongs_to_every_test() -> None:
    lines = {1: (IMPORTING,), 2: ("slow",), 3: ("fast", "failed")}
    marks = Marks({"package/code.py": lines}, {"slow": 2.0, "fast": 0.1})
    assert marks.covering("package/code.py", 1) == ["fast", "slow"]
    assert marks.covering("package/code.py", 3) == ["fast"]
    assert marks.covering("package/code.py", 9, in_function=False) == ["fast", "slow"]


def test_each_test_function_runs_before_its_other_examples() -> None:
    seconds = {"a[1]": 0.1, "a[2]": 0.2, "b": 3.0, "c[x]": 0.3}
    marks = Marks({"package/code.py": {1: tuple(seconds)}}, seconds)
    assert marks.covering("package/code.py", 1) == ["a[1]", "c[x]", "b", "a[2]"]


def test_a_copy_has_the_files_of_the_checkout(tmp_path: Path) -> None:
    root = copy_packages(tmp_path, ["torchrun_runtime"])
    file = "torchrun_runtime/launch/fencing.py"
    assert (root / file).read_bytes() == origin(file).read_bytes()


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("from package.room import code", True),
        ("from package.room import (\n    air,\n    code,\n)", True),
        ("from package.room.code import Name", True),
        ("import package.room.code", True),
        ("from package.room import codes", False),
        ("from package.room.codes import code", False),
        ("from package import code", False),
        ("from package.room import air\ncode = 1", False),
    ],
)
def test_a_file_of_tests_names_the_modules_that_it_imports(
    tmp_path: Path, text: str, is_named: bool
) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(text + "\n")
    assert names_module(file, "package/room/code.py") == is_named
