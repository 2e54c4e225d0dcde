"""Runs the tests of one source file: `make test-of FILE=controller/.../fence.py`.

Tests mirror the paths of the source: the tests of `controller/torchrun_controller/watch/codec.py` are
`tests/unit/watch/test_codec.py`, and any `test_codec_*.py` beside it. Where a file has none, the
tests of its folder run.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNIT = Path("tests/unit")
# Folders of sources, and the folders of tests that mirror them.
MIRRORS = {
    Path("api/torchrun_api"): UNIT / "api",
    Path("controller/torchrun_controller"): UNIT,
    Path("runtime/torchrun_runtime"): UNIT / "runtime",
    Path("plugin/kubectl_torchrun"): UNIT / "plugin",
    Path("sdk/torchrun_sdk"): UNIT / "sdk",
    Path("cluster/torchrun_cluster"): UNIT / "cluster",
    Path("cluster/torchrun_release"): UNIT / "release",
    Path("bench/torchrun_bench"): UNIT / "bench",
    Path("docs"): UNIT / "docs",
    Path("examples"): UNIT / "examples",
    Path("manifests/monitoring"): UNIT / "monitoring",
}


class NoTestsError(Exception):
    """No tests belong to a file; the message names the remedy."""


def find_tests(source: Path) -> list[Path]:
    """The test files of a source file, both relative to the root of the checkout.

    Raises:
        NoTestsError: the file does not exist, or mirrors no folder of tests.
    """
    if not (ROOT / source).is_file():
        raise NoTestsError(f"{source}: no such file. Give its path from the root of the checkout.")
    if source.name.startswith("test_") and source.is_relative_to(UNIT):
        return [source]
    package = next((one for one in MIRRORS if source.is_relative_to(one)), None)
    if package is None:
        mirrors = ", ".join(map(str, MIRRORS))
        raise NoTestsError(f"{source}: unit tests mirror these folders only: {mirrors}.")
    folder = MIRRORS[package] / source.relative_to(package).parent
    if source.name != "__init__.py":
        own = _own_tests(source, folder) or _tests_in(folder / source.stem)
        if own:
            return own
    while folder != UNIT:
        if near := _tests_in(folder):
            return near
        folder = folder.parent
    raise NoTestsError(
        f"{source}: no tests yet. Write {mirror_of(source)}; CONTRIBUTING.md shows how."
    )


def mirror_of(source: Path) -> Path:
    """The test file that a source file of one of MIRRORS has, or should have."""
    package = next(one for one in MIRRORS if source.is_relative_to(one))
    return MIRRORS[package] / source.relative_to(package).with_name(f"test_{source.stem}.py")


def are_own(source: Path, tests: Sequence[Path]) -> bool:
    """Whether these are tests of the file itself, and not those of its folder."""
    return any(
        test == source
        or test.stem.startswith(f"test_{source.stem}")
        or test.parent.name == source.stem
        for test in tests
    )


def _own_tests(source: Path, folder: Path) -> list[Path]:
    """`test_gang.py` and `test_gang_*.py` for gang.py, without those of a gang_*.py beside it."""
    neighbours = [
        path.stem
        for path in (ROOT / source.parent).glob(f"{source.stem}_*.py")
        if path.stem != source.stem
    ]
    return [
        test
        for test in _tests_in(folder)
        if test.stem == f"test_{source.stem}"
        or (
            test.stem.startswith(f"test_{source.stem}_")
            and not any(test.stem.startswith(f"test_{other}") for other in neighbours)
        )
    ]


def _tests_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).glob("test_*.py"))


def main(arguments: Sequence[str]) -> int:
    """Run the tests of the first argument, with the others as options of pytest."""
    if not arguments:
        print("usage: make test-of FILE=controller/torchrun_controller/watch/codec.py")
        return 2
    source = Path(arguments[0])
    if source.is_absolute() and source.is_relative_to(ROOT):
        source = source.relative_to(ROOT)
    try:
        tests = find_tests(source)
    except NoTestsError as error:
        print(error)
        return 2
    if not are_own(source, tests):
        print(f"There is no {mirror_of(source)}: these are the tests of its folder.")
    print(*tests, sep="\n", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "--long",
        *map(str, tests),
        *arguments[1:],
    ]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
