"""ARCHITECTURE.md names files that exist, few packages for each change, and every package."""

import re
from pathlib import Path

from pages import ROOT

PAGE = ROOT / "ARCHITECTURE.md"
CONTROLLER = ROOT / "controller" / "torchrun_controller"
PACKAGES = ("api", "bench", "cluster", "docs", "manifests", "plugin", "runtime", "sdk")


def rows() -> dict[str, list[str]]:
    """What to change, and the files to open."""
    table = PAGE.read_text(encoding="utf-8").partition("## To change X, open Y\n")[2]
    cells = re.findall(r"^\| (.+?) \| (`.+`) \|$", table, re.MULTILINE)
    return {change: re.findall(r"`([^`]+)`", files) for change, files in cells}


def located(path: str) -> Path:
    return (ROOT if path.partition("/")[0] in PACKAGES else CONTROLLER) / path


def package_of(path: str) -> tuple[str, ...]:
    """The folder for reconcile and runtime, otherwise the first part of the path."""
    parts = Path(path).parent.parts
    return parts if parts[:1] == ("reconcile",) or parts[:1] == ("runtime",) else parts[:1]


def test_every_file_of_the_table_exists():
    assert len(rows()) >= 20
    assert {p for paths in rows().values() for p in paths if not located(p).is_file()} == set()


def test_no_change_needs_more_than_three_packages():
    crowded = {change for change, paths in rows().items() if len({*map(package_of, paths)}) > 3}
    assert crowded == set()


def test_every_package_is_described():
    described_in = (
        PAGE.read_text(encoding="utf-8").partition("## Packages\n")[2].partition("\n## ")[0]
    )
    folders = [*CONTROLLER.iterdir(), *(CONTROLLER / "reconcile").iterdir()]
    described = {f.relative_to(CONTROLLER) for f in folders if (f / "__init__.py").is_file()}
    assert {str(package) for package in described if f"`{package}/`" not in described_in} == set()
