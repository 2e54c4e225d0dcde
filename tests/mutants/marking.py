"""Which tests run which line, in any process: marks in a copy of the code record it.

Every statement of the copy is preceded by a mark. A mark writes its line to a file, once for each
test, and needs nothing but the standard library: the launcher runs as a process of its own, with an
environment of its own, and ends by signals.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

IMPORTING = "import"
"""In the place of a test's name: the line runs as its module is imported."""

_MODULE = "mutants_marks"
_MARKS = """\
import os

seen = set()
try:
    with open({current!r}) as file:
        test = file.read()
except OSError:
    test = {importing!r}
_output = os.open({output!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def mark(file, line):
    if (file, line) not in seen:
        seen.add((file, line))
        os.write(_output, ("%s\\t%d\\t%s\\n" % (file, line, test)).encode())
"""


class Marks(Struct, frozen=True):
    """`tests` of each file and line, and the seconds that each test that passed took."""

    tests: dict[str, dict[int, tuple[str, ...]]]
    seconds: dict[str, float]

    def covering(self, file: str, line: int, *, in_function: bool = True) -> list[str]:
        """Tests that run the statement of this line: of each function one, then the others.

        The fastest come first. A line that runs as the module is imported is covered by each test
        of that module.
        """
        lines = self.tests.get(file, {})
        found = {*lines.get(line, ())}
        if IMPORTING in found or not in_function:
            found = {test for tests in lines.values() for test in tests}
        timed = sorted(found & self.seconds.keys(), key=lambda test: (self.seconds[test], test))
        turns: Counter[str] = Counter()
        ordered = []
        for test in timed:
            function = test.partition("[")[0]
            ordered.append((turns[function], test))
            turns[function] += 1
        return [test for _, test in sorted(ordered, key=lambda entry: entry[0])]


def instrument(root: Path, files: Iterable[str]) -> None:
    """Put marks into `files` of the copy at `root`."""
    (root / f"{_MODULE}.py").write_text(
        _MARKS.format(
            current=str(root / "current"), output=str(root / "marks"), importing=IMPORTING
        )
    )
    for file in files:
        path = root / file
        tree = ast.parse(path.read_text())
        tree = ast.fix_missing_locations(_Marker(file).visit(tree))
        prelude = (
            f"import sys\nsys.path.append({str(root)!r})\nfrom {_MODULE} import mark as _mark_\n"
        )
        at = len(list(takewhile(_comes_first, tree.body)))
        tree.body[at:at] = ast.parse(prelude).body
        path.write_text(ast.unparse(tree))


def _comes_first(statement: ast.stmt) -> bool:
    """Docstring and `from __future__`."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.ImportFrom(module="__future__"):
            return True
    return False


class _Marker(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and not isinstance(node, ast.Module):
                setattr(node, name, [new for old in body for new in (*self._mark(old), old)])
        return node

    def _mark(self, statement: ast.stmt) -> list[ast.stmt]:
        if _comes_first(statement):
            return []
        return ast.parse(f"_mark_({self._file!r}, {statement.lineno})").body


class Recorder:
    """A pytest plugin that tells the marks which test runs, and records its duration."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Before the fixtures of a test."""
        self._set_test(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each of its phases."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the recording."""
        for test in self._failed:
            self._seconds.pop(test, None)
        (self._root / "seconds.json").write_bytes(msgspec.json.encode(self._seconds))

    def _set_test(self, test: str) -> None:
        (self._root / "current").write_text(test)
        marks = sys.modules.get(_MODULE)
        if marks is not None:
            marks.test = test  # type: ignore[attr-defined]
            marks.seen.clear()


def read(root: Path) -> Marks:
    """Read the recording in `root`."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    with (root / "marks").open() as marks:
        for mark in marks:
            file, line, test = mark.rstrip("\n").split("\t", 2)
            found[file][int(line)].add(test)
    seconds = msgspec.json.decode((root / "seconds.json").read_bytes(), type=dict[str, float])
    tests = {
        file: {line: tuple(sorted(names)) for line, names in lines.items()}
        for file, lines in found.items()
    }
    return Marks(tests, seconds)


def merged(parts: Iterable[Marks]) -> Marks:
    """Merge several recordings."""
    tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[str, float] = {}
    for part in parts:
        seconds |= part.seconds
        for file, lines in part.tests.items():
            for line, names in lines.items():
                tests[file][line] |= set(names)
    return Marks(
        {f: {n: tuple(sorted(t)) for n, t in lines.items()} for f, lines in tests.items()}, seconds
    )
