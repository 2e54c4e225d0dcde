"""What make targets run, read from the Makefile and from a dry run of it."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from everything.suite import Suite

ROOT = Path(__file__).parents[2]
# pytest, and the programs under tests and bench that judge the code.
_RUNS_TESTS = re.compile(r"/pytest\b|-m (?:soak|torchrun_bench)(?=\s|$)")
_RULE = re.compile(r"^(?P<target>[a-z][a-z0-9%-]*):(?!=)")


class PytestCall(Struct, frozen=True):
    """A pytest of a suite: its paths from the root of the checkout, and whether with `--long`."""

    paths: tuple[str, ...]
    long: bool
    ignored: tuple[str, ...] = ()

    def reaches(self, file: Path) -> bool:
        """Whether it collects this file."""
        return contain(self.paths, file) and not contain(self.ignored, file)


def contain(paths: Sequence[str], file: Path) -> bool:
    """Whether the file is one of these, or in a folder of these."""
    return any(file == ROOT / path or (ROOT / path) in file.parents for path in paths)


def targets_with_tests(makefile: str) -> set[str]:
    """Targets whose own recipe runs tests."""
    found: set[str] = set()
    target = ""
    for line in makefile.replace("\\\n", " ").splitlines():
        if rule := _RULE.match(line):
            target = rule["target"]
        elif line.startswith("\t") and _RUNS_TESTS.search(line):
            found.add(target)
    return found


def dry_run(words: Sequence[str]) -> str:
    """The commands of `make WORDS`, with those of its nested makes."""
    return subprocess.run(
        ("make", "--dry-run", "--no-print-directory", *words),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def pytest_calls(suite: Suite) -> Iterator[PytestCall]:
    """Every pytest that a suite runs."""
    for line in dry_run(suite.command[1:]).replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        for number, word in enumerate(words):
            if word.endswith("bin/pytest"):
                arguments = words[number + 1 :]
                paths = tuple(each for each in arguments if each.startswith("tests"))
                ignored = tuple(
                    each.removeprefix("--ignore=")
                    for each in arguments
                    if each.startswith("--ignore=")
                )
                yield PytestCall(paths, "--long" in arguments, ignored)
