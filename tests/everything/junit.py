"""JUnit files: of pytest to read, and one for each suite without pytest."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from msgspec import Struct


class Case(Struct, frozen=True):
    """A test and its result. `reason`: of a skip."""

    test: str
    failed: bool = False
    skipped: bool = False
    reason: str = ""


def read(folder: Path) -> list[Case]:
    """The tests of all files of a folder. A test of several runs is there several times."""
    return [case for file in sorted(folder.glob("*.xml")) for case in _cases(file)]


def _cases(file: Path) -> Iterator[Case]:
    try:
        root = ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        yield Case(f"{file.name} is no complete JUnit file: {error}", failed=True)
        return
    for element in root.iter("testcase"):
        test = "::".join(filter(None, (element.get("classname"), element.get("name"))))
        failed = any(element.find(tag) is not None for tag in ("failure", "error"))
        skip = element.find("skipped")
        # A test that fails as expected has run.
        skipped = skip is not None and skip.get("type") != "pytest.xfail"
        reason = (skip.get("message") or "") if skip is not None and skipped else ""
        yield Case(test, failed, skipped, reason)


def write(folder: Path, suite: str, seconds: float, problem: str) -> None:
    """A file with one case for the whole suite; `problem` is empty if it has passed."""
    counts = {"tests": "1", "failures": str(int(bool(problem))), "time": f"{seconds:.1f}"}
    root = ElementTree.Element("testsuite", {"name": suite, **counts})
    case = ElementTree.SubElement(root, "testcase", {"name": suite, "time": f"{seconds:.1f}"})
    if problem:
        ElementTree.SubElement(case, "failure", {"message": problem})
    ElementTree.ElementTree(root).write(folder / "suite.xml", encoding="utf-8")
