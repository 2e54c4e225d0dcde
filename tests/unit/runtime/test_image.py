"""Limits of the contents of the image and of the folder in users' images."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
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


# Of the job's environment: a function imports it once it is needed.
OF_THE_JOB = {"debugpy", "pydevd", "torch"}
# On PYTHONPATH of the ranks.
OF_RANKS = {path.stem for path in (LAUNCH / "rank").glob("*.py")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_launcher_is_python_3_8_and_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    at_import = set(imports(tree, inside_functions=False))
    later = set(imports(tree, inside_functions=True)) - at_import
    assert at_import <= sys.stdlib_module_names
    assert later <= sys.stdlib_module_names | OF_THE_JOB | OF_RANKS


def imports(node: ast.AST, *, inside_functions: bool) -> Iterator[str]:
    """The packages that a module imports, except for its types and for this package."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not for_types and (inside_functions or not is_function):
            yield from imports(child, inside_functions=inside_functions)
