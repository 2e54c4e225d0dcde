"""The code for random mutants, and the tests that try them."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from mutants.mutant import CHECKOUT, PACKAGES


class Target(Struct, frozen=True):
    """Files, as patterns below a package's name, and folders and files of tests."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]

    def sources(self) -> list[str]:
        """The files by name, relative to a copy of the packages."""
        paths = (
            f"{pattern.partition('/')[0]}/{path.relative_to(source(pattern))}"
            for pattern in self.files
            for path in source(pattern).glob(pattern.partition("/")[2])
        )
        return sorted({*paths})

    def test_files(self) -> list[str]:
        """The files of tests, relative to the checkout."""
        paths = [path for pattern in self.tests for path in CHECKOUT.glob(pattern)]
        return sorted(str(path.relative_to(CHECKOUT)) for path in paths)

    def digest(self) -> str:
        """A digest of the code, its tests and their shared helpers."""
        digest = hashlib.sha256()
        folders = {(CHECKOUT / test).parent for test in self.test_files()}
        shared = [path for folder in folders for path in folder.glob("*.py")]
        shared += (CHECKOUT / "tests").glob("*.py")
        for path in sorted({*shared, *(origin(file) for file in self.sources())}):
            digest.update(f"{path.relative_to(CHECKOUT)}\0".encode() + path.read_bytes())
        return digest.hexdigest()


# The files of the launcher that decide what happens to ranks. The others read settings, write texts
# or call the system.
LAUNCHER = (
    *("app", "command", "command_end", "copies", "delivery", "failure", "fencing", "gate", "hang"),
    *(
        "preparation",
        "processes",
        "reload",
        "reporting",
        "served",
        "state",
        "supervise",
        "workspace",
    ),
)

TARGETS = (
    Target(
        "core",
        (
            "torchrun_controller/reconcile/gang/fence.py",
            "torchrun_controller/reconcile/gang/fence_order.py",
            "torchrun_controller/reconcile/gang/gang.py",
            "torchrun_controller/reconcile/gang/gate.py",
            "torchrun_controller/reconcile/gang/job_failure.py",
            "torchrun_controller/reconcile/admission/*.py",
        ),
        ("tests/unit/reconcile/**/test_*.py",),
    ),
    Target(
        "pipeline",
        ("torchrun_controller/client/apply.py", "torchrun_controller/cache/store.py"),
        tuple(f"tests/unit/{room}/**/test_*.py" for room in ("cache", "client", "controllers")),
    ),
    Target(
        "launcher",
        (
            "torchrun_runtime/launch/gang/*.py",
            *(f"torchrun_runtime/launch/{name}.py" for name in LAUNCHER),
        ),
        ("tests/unit/runtime/launch/**/test_*.py",),
    ),
)


def source(file: str) -> Path:
    """The folder of the package that a file or pattern belongs to."""
    package = file.partition("/")[0]
    return CHECKOUT / PACKAGES[package] / package


def origin(file: str) -> Path:
    """The path in the checkout of a file of the copy."""
    return source(file) / file.partition("/")[2]


def copy_packages(root: Path, packages: Iterable[str] = PACKAGES) -> Path:
    """Copy the packages, to be imported instead of the checkout. Returns `root`."""
    ignored = shutil.ignore_patterns("__pycache__")
    for package in packages:
        shutil.copytree(source(package), root / package, ignore=ignored)
    return root
