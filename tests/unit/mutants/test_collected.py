"""Bugs in loaded code, tried in forks of the process that has loaded it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mutants.collected import put_into_functions
from mutants.sites import sites

CODE = """\
from contextlib import contextmanager


def outer(a):
    def inner(b):
        return a + b

    return inner


class Counter:
    def __init__(self):
        self.count = 0

    @property
    def double(self):
        if self.count > 1:
            raise ValueError(
                "too many"
            )
        return self.count * 2


@contextmanager
def held(told):
    told.append("held")
    yield
    told.append("free")
"""


@pytest.fixture
def loaded(tmp_path: Path) -> ModuleType:
    path = tmp_path / "loaded_code.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("loaded_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loaded_code"] = module
    spec.loader.exec_module(module)
    return module


def plant(module: ModuleType, line: int, after: str) -> None:
    path = Path(str(module.__file__))
    (site,) = (s for s in sites(path, "x") if (s.line, s.after) == (line, after))
    assert site.in_function
    assert put_into_functions(path, site.mutate(CODE)) == 1


def test_imported_names_have_the_bug(loaded: ModuleType) -> None:
    outer = loaded.outer
    plant(loaded, 6, "-")
    assert outer(3)(1) == 2


def test_a_property_has_the_bug_and_line_numbers_stay(loaded: ModuleType) -> None:
    counter = loaded.Counter()
    counter.count = 2
    plant(loaded, 17, "pass")
    assert counter.double == 4


def test_a_decorated_function_has_the_bug(loaded: ModuleType) -> None:
    calls: list[str] = []
    plant(loaded, 28, "pass")
    with loaded.held(calls):
        pass
    assert calls == ["held"]


def test_code_outside_functions_needs_a_new_process(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("LIMIT = 3\n\n\ndef f(a=4):\n    return a + LIMIT\n")
    assert [(s.line, s.in_function) for s in sites(path, "x")] == [
        (1, False), (4, False), (5, True), (5, True),
    ]  # fmt: skip
