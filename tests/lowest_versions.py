"""Imports every module with the lowest versions of the packages that the project may run with.

python tests/lowest_versions.py             # the requirements, for pip install -r
python tests/lowest_versions.py --import    # in an environment that has them
"""

import importlib
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECTS = ("pyproject.toml", "plugin/pyproject.toml")
PACKAGES = ("torchrun_api", "torchrun_controller", "torchrun_runtime", "kubectl_torchrun")


def dependencies(project: str) -> list[str]:
    """Return the packages that the wheel of this pyproject.toml requires."""
    declared = tomllib.loads((ROOT / project).read_text(encoding="utf-8"))["project"]
    return [str(each) for each in declared["dependencies"]]


def lowest(dependency: str) -> str:
    """Return the requirement of exactly the lowest version, which must exist."""
    name, bound, version = dependency.partition(">=")
    if not bound:
        raise ValueError(f"{dependency} has no lowest version")
    return f"{name}=={version}"


def modules() -> Iterator[str]:
    """Yield the names of all modules; the import of a package precedes that of its modules."""
    for name in PACKAGES:
        yield name
        found = pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}.")
        yield from (module.name for module in found)


def main() -> None:
    """Print the requirements, or import."""
    if "--import" in sys.argv:
        # What reads the bytes of a server catches ValueError.
        assert issubclass(importlib.import_module("msgspec").DecodeError, ValueError)
        count = len([importlib.import_module(name) for name in modules()])
        print(f"{count} modules can be imported with the lowest versions of their dependencies")
        return
    print(
        "\n".join(sorted({lowest(each) for project in PROJECTS for each in dependencies(project)}))
    )


if __name__ == "__main__":
    main()
