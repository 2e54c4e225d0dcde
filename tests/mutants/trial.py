"""The trial of a mutant: a copy of the code with the bug, and tests on that copy."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from mutants.mutant import CHECKOUT, CONTROLLER, PACKAGES, Mutant
from mutants.targets import copy_packages

# The tests for survivors of their own tests: all fast tests of the controller, then faults.
ROOMS = ("client", "watch", "cache", "workqueue", "controllers", "leader", "reconcile")
EVERYTHING = {
    CONTROLLER: (
        *(f"tests/unit/{room}" for room in ROOMS),
        "tests/unit/test_app.py",
        "tests/faults/test_regressions.py",
        "tests/faults/test_singles.py",
    ),
    "torchrun_runtime": ("tests/unit/runtime",),
    "kubectl_torchrun": ("tests/unit/plugin",),
    "torchrun_sdk": ("tests/unit/sdk",),
    "torchrun_api": ("tests/unit/api", "tests/unit/reconcile", "tests/unit/plugin"),
}
ONE_TEST = 120  # timeout in seconds, which counts as a failure: a bug may block forever
ALL_TESTS = 1800.0

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
_TESTS_FAILED = 1  # exit code of pytest; other codes mean that no test ran


class Verdict(Struct, frozen=True):
    """`killer`: the failed test; "" for none."""

    killer: str
    seconds: float


class Unusable(Exception):  # noqa: N818 named for the state
    """The tests did not run, or do not pass without any bug."""


class Copy:
    """A copy of all packages, which tests import instead of the checkout."""

    def __init__(self, root: Path) -> None:
        self._root = copy_packages(root)
        for package in PACKAGES:
            imported = self._python("-c", f"import {package}; print({package}.__file__)").stdout
            if not imported.startswith(str(root / package)):
                raise Unusable(f"tests would import {imported.strip()}, which has no bug")

    @contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """Plant the bug until the end of the block. Raises DoesNotApplyError."""
        mutant.plant(self._root)
        try:
            yield
        finally:
            shutil.copyfile(mutant.origin, self._root / mutant.package / mutant.file)

    def test(self, tests: Sequence[str]) -> Verdict:
        """Run tests until one fails, for `ALL_TESTS` seconds at most. Raises Unusable."""
        began = time.monotonic()
        options = ("-x", "-q", "--no-header", "--tb=no", f"--timeout={ONE_TEST}", "-n", "0")
        quiet = ("-p", "no:cacheprovider", "--hypothesis-seed=0")
        try:
            done = self._python("-m", "pytest", *options, *quiet, *tests)
        except subprocess.TimeoutExpired:
            return Verdict("", time.monotonic() - began)
        failed = _FAILED.search(done.stdout)
        if done.returncode not in (0, _TESTS_FAILED) or bool(failed) != bool(done.returncode):
            raise Unusable(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return Verdict(failed[1] if failed else "", time.monotonic() - began)

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": str(self._root),
            "PYTHONHASHSEED": "0",
            # Compile again after each change, independent of the resolution of the clock.
            "PYTHONDONTWRITEBYTECODE": "1",
            # Examples that fail by a bug must not reach the database of the checkout.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._root / "hypothesis"),
        }
        environment.pop("KUBECONFIG", None)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=CHECKOUT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=ALL_TESTS,
            check=False,
        )


def judge(copy: Copy, mutant: Mutant) -> Verdict:
    """Run its own tests, then all others. Raises DoesNotApplyError and Unusable."""
    with copy.with_bug(mutant):
        first = copy.test(mutant.tests)
        if first.killer:
            return first
        second = copy.test(EVERYTHING[mutant.package])
    # Its own tests have just passed without the bug; any other test may fail by chance.
    chance = bool(second.killer) and bool(copy.test([second.killer]).killer)
    return Verdict("" if chance else second.killer, first.seconds + second.seconds)
