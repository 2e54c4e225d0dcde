"""Limits of the contents of the image and of the folder in users' images."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "runtime/torchrun_runtime/launch"
SOURCES = sorted(LAUNCH.rglob("*.py"))


def pins(name: str) -> dict[str, list[str]]:
    """Hashes by normalised project name. Fails on lines that are no pins."""
    by_folder: dict[str, list[str]] = {}
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "requirements" / name).read_text())
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split(" --hash=")
        match = re.match(r"([a-z0-9-]+)==[0-9][^ ;]*( ;.*)?$", requirement.strip())
        assert match, entry
        by_folder[match[1]] = [one.strip() for one in hashes]
    return by_folder


@pytest.mark.parametrize("name", ["controller.txt", "build.txt", "sbom.txt"])
def test_locks_hold_pins_with_hashes_and_no_address(name: str) -> None:
    locked = pins(name)
    assert all(hashes for hashes in locked.values())
    assert all(one.startswith("sha256:") for hashes in locked.values() for one in hashes)


def test_every_dependency_of_the_project_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = project["project"]["dependencies"] + project["build-system"]["requires"]
    wanted = {re.split(r"[^A-Za-z0-9_.-]", name)[0].lower().replace("_", "-") for name in names}
    assert wanted <= pins("controller.txt").keys() | pins("build.txt").keys()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_launcher_is_python_3_8_and_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] in sys.stdlib_module_names, name
